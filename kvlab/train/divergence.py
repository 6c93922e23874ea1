"""Detect that a training has diverged: a loss that is not finite, or one that stays high."""

import math
from collections.abc import Sequence

from kvlab.errors import Diverged
from kvlab.spec import TrainingConfig

WINDOW = 32
"""Steps whose mean loss is compared. A spike that passes sooner is noise."""


def check_finite(name: str, value: float, training: TrainingConfig, step: int) -> None:
    """Check that a value is neither NaN nor infinite.

    Raises:
        Diverged: it is.
    """
    if not math.isfinite(value):
        raise Diverged(_divergence_message(f"the {name} is {value}", training, step))


def check_spike(
    recent: Sequence[float], lowest: float | None, training: TrainingConfig, step: int
) -> float | None:
    """Check the mean loss of the last `WINDOW` steps against the lowest such mean so far.

    Args:
        recent: losses of the last steps, at most `WINDOW`.
        lowest: the return value for the step before.

    Returns:
        The lowest mean including this step; None before there are `WINDOW` losses.

    Raises:
        Diverged: the mean is ``training.spike`` nats above the lowest.
    """
    if len(recent) < WINDOW:
        return lowest
    mean = math.fsum(recent) / len(recent)
    if lowest is None or mean < lowest:
        return mean
    if training.spike is not None and mean > lowest + training.spike:
        rise = f"from {lowest:.3f} to {mean:.3f}, over training.spike = {training.spike:g},"
        text = f"the mean loss of {WINDOW} steps rose {rise}"
        raise Diverged(_divergence_message(text, training, step))
    return lowest


def _divergence_message(text: str, training: TrainingConfig, step: int) -> str:
    where = f"at step {step} of {training.steps}"
    rate = f"with learning_rate = {training.learning_rate:g}"
    return f"{text} {where}, {rate}; lower it, or lengthen warmup_tokens"
