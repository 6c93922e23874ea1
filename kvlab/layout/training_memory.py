"""Estimate the device memory of a training; the KV layout, in contrast, is exact.

Counted are weights, gradients, the optimizer's moments, what is saved for the backward pass (on CPU
with the probabilities of attention), and one chunk of logits with its softmax. Not counted are
the allocator's waste and the process itself. Progress, logs and results state the same quantity as
measured, ``peak_bytes``: on CPU within three tenths of the estimate and 24 MB.
"""

from collections.abc import Iterator

from kvlab.layout.gpu_sharing import CONTEXT_BYTES
from kvlab.layout.kv_layout import KVLayout
from kvlab.own_extensions import find_members
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.experiment import Experiment
from kvlab.spec.flops import matrix_weights, parameter_count
from kvlab.spec.training_config import OPTIMIZERS

CPU_MICROBATCH_TOKENS = 4096
"""The most tokens of one pass on CPU. Narrow models gain from longer passes, in which the cost of
calling an operation is spread over more tokens; `kvlab/benchmark/LOG.md` has the timings."""

CPU_ACTIVATION_BYTES = 2**30
"""The most bytes that the activations of one pass on CPU are meant to take. Wide models gain no
speed from longer passes."""

ACTIVATION_MEMORY_SHARE = 0.25
"""The share of a GPU's memory that the activations of one pass are meant to take."""

LOSS_CHUNK_TOKENS = {"cpu": 512, "cuda": 4096}
"""Tokens whose logits exist at once. On CPU they are few enough for a core's cache and enough for
a full-speed matrix product; `kvlab/benchmark/LOG.md` has the timings."""

CPU_PROCESS_BYTES = 450 * 10**6
"""The resident size of a trial's process on CPU without its tensors: Python, PyTorch and Ray."""

_MARGIN = 2
"""By which activations are overestimated when a microbatch is chosen, so that it fits with room
to spare. The estimate of the peak is without it, and within three tenths of what a memory profile
of the quickstart's model and six variants of it shows on CPU."""

_FLOAT_BYTES = 4
"""Of a weight, a gradient and a moment; and of a probability that attention saves, whatever the
training's precision."""


def activation_bytes(experiment: Experiment) -> int:
    """Return the bytes that one token keeps for the backward pass, `_MARGIN` times the estimate.

    Counted are norms and residuals, what the mixer of a layer keeps, such as q, k, v and the output
    of attention, and the hidden values of the MLP before and after activation. With
    `training.kv_dtype` K and V are kept once more as they are read, in blocks beside the exact
    ones. Extensions say how the inputs of linear layers are kept.
    """
    model, kv = experiment.model, experiment.training.kv
    residual_values = (6 + 2 * model.norms_per_layer) * model.n_embd
    values = model.n_layer * (residual_values + model.mlp_matrices * model.ffn_dim)
    if kv.identity(model):
        layout = KVLayout.of_training(model, kv)
        plans = [layout.plans[owner] for owner in layout.slots]
        values += sum(plan.trained_copies * plan.layer.store_width for plan in plans)
    item_bytes = DTYPES[experiment.training.precision].item_bytes
    inputs = model.n_layer * (2 * model.n_embd + model.ffn_dim)  # of linear layers, but the head
    inputs += sum(layer.out_width for layer in model.layers)
    find_sizes = find_members("linear_input_bytes").values()
    sizes = (find(experiment.training, item_bytes) for find in find_sizes)
    input_bytes: int = min([item_bytes, *sizes])
    mixed = sum(one.mixer.saved_bytes(one, model.block_size, item_bytes) for one in model.layers)
    return _MARGIN * (item_bytes * values - (item_bytes - input_bytes) * inputs + mixed)


def microbatch_rows(experiment: Experiment, memory: int | None) -> int:
    """Return the rows of ``block_size`` tokens in one forward pass, a divisor of a worker's rows.

    Args:
        memory: bytes of the GPU, of which trials that share it have their parts; None on CPU.
    """
    block_size = experiment.model.block_size
    rows = experiment.training.batch_tokens // block_size // experiment.resources.training_workers
    tokens = experiment.resources.microbatch_tokens
    if tokens is None:
        part = min(1.0, experiment.resources.devices or 1.0)  # a script has all of its GPU
        share = CPU_ACTIVATION_BYTES if memory is None else memory * part * ACTIVATION_MEMORY_SHARE
        tokens = int(share / activation_bytes(experiment))
        tokens = min(tokens, CPU_MICROBATCH_TOKENS) if memory is None else tokens
    largest = max(1, min(rows, tokens // block_size))
    return max(n for n in range(1, largest + 1) if rows % n == 0)


def process_bytes(experiment: Experiment) -> int:
    """Return what a trial's process takes of the memory that it trains in, beside its tensors."""
    return CONTEXT_BYTES if experiment.resources.devices else CPU_PROCESS_BYTES


def training_peak_bytes(experiment: Experiment, memory: int | None = None) -> int:
    """Estimate the most bytes that a training holds at once.

    Args:
        memory: bytes of the GPU, which an unset microbatch is chosen for; None assumes the least
            on a GPU, one row.
    """
    model = experiment.model
    if not experiment.training.steps:
        return _FLOAT_BYTES * parameter_count(model)
    on_gpu = experiment.resources.devices > 0
    rows = microbatch_rows(experiment, (memory or 0) if on_gpu else None)
    tokens = rows * model.block_size
    activations = tokens * activation_bytes(experiment) // _MARGIN
    probabilities = 0 if on_gpu else _probability_bytes(experiment, rows)
    logits = _logit_bytes(experiment, tokens, on_gpu=on_gpu)
    # weights, gradients and two moments, of which an optimizer may save some of matrices
    matrices = matrix_weights(model) - model.vocab_size * model.n_embd  # without the head
    saved = 2 - OPTIMIZERS[experiment.training.optimizer].matrix_moments
    states = _FLOAT_BYTES * (4 * parameter_count(model) - saved * matrices)
    return states + activations + probabilities + logits


def _logit_bytes(experiment: Experiment, tokens: int, *, on_gpu: bool) -> int:
    """Return the bytes of one chunk of logits with what its loss and gradient need."""
    model, vocabulary = experiment.model, experiment.model.vocab_size
    chunk = min(tokens, LOSS_CHUNK_TOKENS["cuda" if on_gpu else "cpu"])
    item, float32 = DTYPES[experiment.training.precision].item_bytes, DTYPES["float32"].item_bytes
    if item == float32:
        return chunk * vocabulary * float32  # softmax and gradient are in place
    if on_gpu:  # likewise, and a chunk's product for the weight's gradient is float32
        return vocabulary * (chunk * item + model.n_embd * float32)
    # logits, their softmax, and the gradient, converted for the matrix products
    return chunk * vocabulary * (item + float32 + item)


def _probability_bytes(experiment: Experiment, rows: int) -> int:
    """Return the bytes of all layers' attention probabilities; a compiled model keeps none."""
    model, training = experiment.model, experiment.training
    if training.compile:
        return 0
    has_documents = experiment.data.mask_documents
    plans = KVLayout.of_training(model, training.kv).plans
    layers = [plan.layer for plan in plans if plan.has_causal_queries]
    return sum(
        saved_probability_bytes(
            rows,
            layer.n_head,
            layer.key_dim,
            model.block_size,
            find_tile_window(layer.window, layer.sink_tokens, has_documents=has_documents),
            layer.sink_tokens,
            is_bfloat16=training.precision == "bfloat16",
            has_sink=layer.has_sink,
        )
        for layer in layers
    )


# Tiled attention on CPU saves its probabilities. This is the arithmetic of
# `kvlab.model.kernels.tiled_attention`, without torch.

QUERY_TILE = 64
"""Queries of one tile; it reads every key that any of them sees."""

MIN_HEAD_DIM, MIN_LENGTH = 16, 256
"""Below these another backend is faster."""

MAX_BFLOAT16_LENGTH = 1024
"""Tokens of a sequence in bfloat16 without a window, above which another backend is faster."""

MAX_SAVED_BYTES = 128 * 2**20
"""Of one layer."""


def find_tile_window(window: int | None, sink_tokens: int, *, has_documents: bool) -> int | None:
    """Return the window that tiles follow: none where each document has sinks somewhere."""
    return None if has_documents and sink_tokens else window


def query_tiles(
    length: int, window: int | None, sink_tokens: int
) -> Iterator[tuple[int, int, int]]:
    """Yield for each tile its first query, the end of its queries and the first key it reads.

    A tile reads the sinks as well, unless it reads all keys from the first on.
    """
    for start in range(0, length, QUERY_TILE):
        first_key = 0 if window is None else max(0, start - window + 1)
        if first_key <= sink_tokens:
            first_key = 0
        yield start, min(start + QUERY_TILE, length), first_key


def saved_probability_bytes(
    rows: int,
    heads: int,
    head_dim: int,
    length: int,
    window: int | None,
    sink_tokens: int,
    *,
    is_bfloat16: bool,
    has_sink: bool,
) -> int:
    """Return the bytes that one layer saves for ``rows`` sequences of ``length`` tokens.

    Args:
        window: tokens that a query sees, itself included; None: all before it.
        sink_tokens: the first tokens, which it sees beside the window.
        has_sink: a logit joins the denominators, for which no other backend saves less.

    Returns:
        0 where another backend is faster and used instead.
    """
    is_global = window is None or window >= length
    is_slow = length < MIN_LENGTH or head_dim < MIN_HEAD_DIM
    is_slow |= is_bfloat16 and is_global and length > MAX_BFLOAT16_LENGTH
    if is_slow and not has_sink:
        return 0
    pairs = sum(
        (end - start) * (end - first + (sink_tokens if first else 0))
        for start, end, first in query_tiles(length, window, sink_tokens)
    )
    saved = _FLOAT_BYTES * rows * heads * pairs
    return saved if has_sink or saved <= MAX_SAVED_BYTES else 0
