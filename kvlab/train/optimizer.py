"""AdamW as GPT-2's reproductions use it."""

import math
from collections.abc import Callable

import torch
from torch.optim import AdamW

from kvlab.model import GPT
from kvlab.spec import TrainingConfig

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


# The learning rate as a pure function of the step.


def learning_rate(training: TrainingConfig, step: int) -> float:
    """The rate of the optimizer step ``step`` (0-based; ``training.steps`` of them).

    Linear warm-up over ``warmup_tokens``, rounded up to whole steps: step 0 gets one part of
    it, the last warm-up step all of ``learning_rate``. Then ``training.schedule``, which would
    reach ``final_learning_rate`` at step ``training.steps``, one after the last. So it is done
    in the published reproductions of GPT-2.
    """
    peak, final = training.learning_rate, training.final_learning_rate
    assert final is not None, "filled in by the spec"
    assert training.warmup_tokens is not None, "filled in by the spec"
    warmup = min(_whole_steps(training, training.warmup_tokens), training.steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    share = _SCHEDULES[training.schedule](training, warmup, step)
    return share * peak + (1 - share) * final


def _cosine_share(training: TrainingConfig, warmup: int, step: int) -> float:
    """Half a cosine from the end of warm-up on."""
    progress = (step - warmup) / max(1, training.steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def _wsd_share(training: TrainingConfig, warmup: int, step: int) -> float:
    """Warm-up, stable, decay: the peak until ``decay_tokens`` before the end, then 1 - sqrt,
    which Hägele et al. (arXiv 2405.18392) find better than a straight line."""
    assert training.decay_tokens is not None, "filled in by the spec"
    decay = min(_whole_steps(training, training.decay_tokens), training.steps - warmup)
    began = training.steps - decay
    return 1.0 if step < began else 1 - math.sqrt((step - began) / max(1, decay))


def _whole_steps(training: TrainingConfig, tokens: int) -> int:
    return -(-tokens // training.batch_tokens)


_SCHEDULES: dict[str, Callable[[TrainingConfig, int, int], float]] = {
    "cosine": _cosine_share,
    "wsd": _wsd_share,
}
