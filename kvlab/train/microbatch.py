"""How many rows of a step go through the model at once. Same mathematics, other memory."""

import torch

from kvlab.layout.training_memory import microbatch_rows as rows_for
from kvlab.spec.experiment import Experiment


def microbatch_rows(experiment: Experiment, device: torch.device) -> int:
    """Rows of ``block_size`` tokens in one forward pass; divides a worker's rows of a step.

    ``resources.microbatch_tokens`` if given. It depends on the experiment and the kind of
    device alone, so that a resumed run sums in the same order.
    """
    memory = None
    if device.type == "cuda":
        share = min(1.0, experiment.resources.devices)
        memory = int(torch.cuda.get_device_properties(device).total_memory * share)
    return rows_for(experiment, memory)
