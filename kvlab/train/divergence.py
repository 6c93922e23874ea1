"""When a training has diverged: its loss is no number, or it left what it had learnt."""

import math
from collections.abc import Sequence

from kvlab.errors import Diverged
from kvlab.spec import TrainingConfig

WINDOW = 32
"""Steps whose mean loss is compared: a spike that passes sooner is noise."""


def check_finite(name: str, value: float, training: TrainingConfig, step: int) -> None:
    """Raises:
    Diverged: ``value`` is NaN or infinite.
    """
    if not math.isfinite(value):
        raise Diverged(_divergence_message(f"the {name} is {value}", training, step))


def check_spike(
    recent: Sequence[float], lowest: float | None, training: TrainingConfig, step: int
) -> float | None:
    """The lowest mean loss of `WINDOW` steps so far.

    Args:
        recent: losses of the last steps, at most `WINDOW`.
        lowest: what this gave for the step before.

    Raises:
        Diverged: ``training.spike`` nats above it.
    """
    if len(recent) < WINDOW:
        return lowest
    mean = math.fsum(recent) / len(recent)
    if lowest is None or mean < lowest:
        return mean
    if training.spike is not None and mean > lowest + training.spike:
        rise = f"from {lowest:.3f} to {mean:.3f}, over training.spike = {training.spike:g},"
        raise Diverged(
            _divergence_message(f"the mean loss of {WINDOW} steps rose {rise}", training, step)
        )
    return lowest


def _divergence_message(what: str, training: TrainingConfig, step: int) -> str:
    place = f"at step {step} of {training.steps}"
    rate = f"with learning_rate = {training.learning_rate:g}"
    return f"{what} {place}, {rate}; lower it, or lengthen warmup_tokens"
