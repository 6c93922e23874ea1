"""AdamW as GPT-2's reproductions use it."""

import torch
from torch.optim import AdamW

from kvlab.model import GPT
from kvlab.spec.parts import TrainingConfig

FUSED_DEVICES = frozenset({"cpu", "cuda"})
"""Devices on which torch updates all of a parameter's state in one pass over memory."""


def make_optimizer(model: GPT, training: TrainingConfig) -> AdamW:
    """AdamW (arXiv 1711.05101) with ``weight_decay`` on matrices, none on biases and norms."""
    matrices, others = model.decay_groups()
    return AdamW(
        [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.adam_eps,
        fused=model.device.type in FUSED_DEVICES,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next step, for every parameter."""
    for group in optimizer.param_groups:
        group["lr"] = rate
