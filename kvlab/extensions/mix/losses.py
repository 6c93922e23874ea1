"""The loss of each source of a mix: a loss of all targets, divided."""

import numpy as np

from kvlab.data.batches import ScoredText
from kvlab.evaluate.evaluation import Measurements
from kvlab.evaluate.validation_loss import Floats
from kvlab.spec.experiment import Experiment


def divide_losses(
    text: ScoredText, nats: Floats, experiment: Experiment, suffix: str
) -> Measurements:
    """Return the mean nats and the number of the targets of each source.

    Without a mix nothing is measured.
    """
    parts, measured = experiment.data.parts, Measurements()
    if len(parts) == 1:
        return measured
    shape = len(text), text.block_size
    owners = text.flatten(np.broadcast_to(text.window_parts[:, None], shape))
    for number, part in enumerate(parts):
        own, name = nats[owners == number], part.data.source.replace("-", "_")
        if len(own):
            measured[f"loss_{name}{suffix}"] = float(own.mean())
            measured[f"loss_{name}{suffix}_tokens"] = len(own)
    return measured
