"""The learning rate as a pure function of the step."""

import math

from kvlab.spec.parts import TrainingConfig


def learning_rate(training: TrainingConfig, step: int) -> float:
    """The rate of the optimizer step ``step`` (0-based; ``training.steps`` of them).

    Linear warm-up over ``warmup_tokens``, rounded up to whole steps: step 0 gets one part of
    it, the last warm-up step all of ``learning_rate``. Then half a cosine, which would reach
    ``final_learning_rate`` at step ``training.steps``, one after the last. So it is done in
    the published reproductions of GPT-2.
    """
    peak, final = training.learning_rate, training.final_learning_rate
    assert final is not None, "filled in by the spec"
    assert training.warmup_tokens is not None, "filled in by the spec"
    warmup = min(-(-training.warmup_tokens // training.batch_tokens), training.steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, training.steps - warmup)
    share = 0.5 * (1 + math.cos(math.pi * progress))
    return share * peak + (1 - share) * final
