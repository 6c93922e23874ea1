"""The learning rate as a pure function of the step."""

import math
from collections.abc import Callable

from kvlab.spec.parts import TrainingConfig


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
    warmup = min(_steps(training, training.warmup_tokens), training.steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    share = _SHARES[training.schedule](training, warmup, step)
    return share * peak + (1 - share) * final


def _cosine(training: TrainingConfig, warmup: int, step: int) -> float:
    """Half a cosine from the end of warm-up on."""
    progress = (step - warmup) / max(1, training.steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def _wsd(training: TrainingConfig, warmup: int, step: int) -> float:
    """Warm-up, stable, decay: the peak until ``decay_tokens`` before the end, then 1 - sqrt,
    which Hägele et al. (arXiv 2405.18392) find better than a straight line."""
    assert training.decay_tokens is not None, "filled in by the spec"
    decay = min(_steps(training, training.decay_tokens), training.steps - warmup)
    began = training.steps - decay
    return 1.0 if step < began else 1 - math.sqrt((step - began) / max(1, decay))


def _steps(training: TrainingConfig, tokens: int) -> int:
    return -(-tokens // training.batch_tokens)


_SHARES: dict[str, Callable[[TrainingConfig, int, int], float]] = {"cosine": _cosine, "wsd": _wsd}
