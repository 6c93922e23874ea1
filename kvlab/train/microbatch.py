"""How many rows of a step go through the model at once. Same mathematics, other memory."""

import torch

from kvlab.layout import ITEM_BYTES
from kvlab.spec.experiment import Experiment

CPU_TOKENS = 1024
"""A quarter megabyte of a layer's activations stays in a core's cache. Measured on one core for
the quickstart's shape, tokens/s at 1,024, 2,048 and 4,096 tokens: 6,320, 6,220, 5,790."""

MEMORY_SHARE = 0.25
"""Share of a device's memory that the activations of one pass are meant to take."""


def microbatch_rows(experiment: Experiment, device: torch.device) -> int:
    """Rows of ``block_size`` tokens in one forward pass; divides a worker's rows of a step.

    ``resources.microbatch_tokens`` if given. It depends on the experiment and the kind of
    device alone, so that a resumed run sums in the same order.
    """
    block = experiment.model.block_size
    rows = experiment.training.batch_tokens // block // experiment.resources.training_workers
    tokens = experiment.resources.microbatch_tokens or _default_tokens(experiment, device)
    most = max(1, min(rows, tokens // block))
    return max(n for n in range(1, most + 1) if rows % n == 0)


def _default_tokens(experiment: Experiment, device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_TOKENS
    memory = torch.cuda.get_device_properties(device).total_memory
    return int(memory * MEMORY_SHARE / _activation_bytes(experiment))


def _activation_bytes(experiment: Experiment) -> int:
    """About what one token keeps for the backward pass, rounded up: norms and residuals, q, k
    and v, the attention's output, and the MLP's hidden values before and after activation."""
    model = experiment.model
    gated = 3 if model.mlp == "swiglu" else 2
    layer = 10 * model.n_embd + 4 * model.n_head * model.head_dim + gated * model.ffn_dim
    return 2 * ITEM_BYTES[experiment.training.precision] * model.n_layer * layer
