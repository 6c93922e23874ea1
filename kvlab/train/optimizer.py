"""AdamW and the learning-rate schedule, as published reproductions of GPT-2 use them."""

import math

from torch.optim import AdamW

from kvlab.model import GPT
from kvlab.spec import TrainingConfig

FUSED_DEVICES = frozenset({"cpu", "cuda"})
"""Devices on which torch updates all of a parameter's state in one pass over memory."""


def make_optimizer(model: GPT, training: TrainingConfig) -> AdamW:
    """Return AdamW (arXiv 1711.05101) with weight decay on matrices, not on biases and norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
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


def learning_rate(training: TrainingConfig, step: int) -> float:
    """Return the learning rate of the optimizer step ``step``, a pure function of it.

    Linear warm-up over ``warmup_tokens``, rounded up to whole steps: step 0 gets one part of it,
    the last warm-up step all of ``learning_rate``. Then ``training.schedule``, which would reach
    ``final_learning_rate`` at step ``training.steps``, one after the last.

    Args:
        step: from 0 to ``training.steps - 1``.
    """
    peak, final = training.learning_rate, training.final_learning_rate
    assert final is not None, "filled in by the spec"
    warmup = training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if training.schedule == "wsd":
        # Warm-up, stable, decay: the peak until ``decay_tokens`` before the end, then 1 - sqrt.
        # Hägele et al. (arXiv 2405.18392) find that shape better than a straight line.
        start = training.steps - training.decay_steps
        decayed = max(0, step - start) / max(1, training.decay_steps)
        share = 1 - math.sqrt(decayed)
    else:  # half a cosine after the warm-up
        progress = (step - warmup) / max(1, training.steps - warmup)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    return share * peak + (1 - share) * final
