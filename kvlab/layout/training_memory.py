"""What training a model takes in device memory: an estimate, where the KV layout is exact.

Counted: weights, gradients and AdamW's two moments, what the backward pass keeps, attention's
probabilities on CPU among it, and one chunk of logits with its softmax. Not counted: what the
allocator wastes, and the process itself.
"""

from kvlab.layout.cpu_attention_memory import saved_probability_bytes
from kvlab.layout.flops import parameter_count
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.experiment import Experiment

CPU_MICROBATCH_TOKENS, CPU_ACTIVATION_BYTES = 4096, 2**30
"""The most tokens of one pass on CPU, and the most bytes that their activations are meant to
take: narrow models gain from longer passes, whose operations then win back their calls, wide ones
only take more memory. Measured on one core for the quickstart's shape, tokens/s at 1,024, 2,048
and 4,096 tokens: 12,900, 14,300, 14,400; on two 14,800, 18,400, 20,400. On one core with four
times its width 2,200, 2,240, 2,250; GPT-2 124M is as fast at 1,024 as at 2,048."""

ACTIVATION_MEMORY_SHARE = 0.25
"""Share of a device's memory that the activations of one pass are meant to take."""

LOSS_CHUNK_TOKENS = {"cpu": 512, "cuda": 4096}
"""Tokens whose logits exist at once. On CPU small enough for a core's cache and large enough for
a full-speed matrix product: measured at 4,096 tokens forward and backward, 89 ms against 150 ms
for one piece (V 2304, E 128), and 2.8 s against 3.4 s a thousand tokens (V 50304, E 768)."""

_MARGIN = 2
"""A microbatch is chosen to fit with room to spare; the estimate of the peak is without it, and
within three tenths of what a memory profile of the quickstart's shape and six of its relatives
shows on CPU."""

_STATE_BYTES = 16
"""Weight, gradient and two moments of a parameter, each in float32."""


def activation_bytes(experiment: Experiment) -> int:
    """What one token keeps for the backward pass, with a margin of `_MARGIN`: norms and
    residuals, q, k and v, the attention's output, the MLP's hidden values before and after
    activation."""
    model = experiment.model
    gated = 3 if model.mlp == "swiglu" else 2
    layer = 10 * model.n_embd + 4 * model.n_head * model.head_dim + gated * model.ffn_dim
    return _MARGIN * DTYPES[experiment.training.precision].item_bytes * model.n_layer * layer


def microbatch_rows(experiment: Experiment, memory: int | None) -> int:
    """Rows of ``block_size`` tokens in one forward pass; divides a worker's rows of a step.

    Args:
        memory: bytes of the GPU; None on CPU.
    """
    block = experiment.model.block_size
    rows = experiment.training.batch_tokens // block // experiment.resources.training_workers
    tokens = experiment.resources.microbatch_tokens
    if tokens is None and memory is None:
        tokens = min(CPU_MICROBATCH_TOKENS, CPU_ACTIVATION_BYTES // activation_bytes(experiment))
    elif tokens is None and memory is not None:
        tokens = int(memory * ACTIVATION_MEMORY_SHARE / activation_bytes(experiment))
    most = max(1, min(rows, (tokens or 0) // block))
    return max(n for n in range(1, most + 1) if rows % n == 0)


def training_peak_bytes(experiment: Experiment, memory: int | None = None) -> int:
    """About the most bytes that a training holds at once.

    Args:
        memory: bytes of the GPU, which an unset microbatch is made for; None takes the least on
            a GPU, one row.
    """
    on_gpu = experiment.resources.devices > 0
    if on_gpu and memory is None and experiment.resources.microbatch_tokens is None:
        rows = 1
    else:
        rows = microbatch_rows(experiment, memory if on_gpu else None)
    tokens = rows * experiment.model.block_size
    chunk = min(tokens, LOSS_CHUNK_TOKENS["cuda" if on_gpu else "cpu"])
    item, single = DTYPES[experiment.training.precision].item_bytes, DTYPES["float32"].item_bytes
    each = item + single  # logits and their softmax
    if item != single:
        each += item  # the gradient as products take it
    elif not on_gpu:
        each = single  # softmax in place
    logits = chunk * experiment.model.vocab_size * each
    states = _STATE_BYTES * parameter_count(experiment.model)
    activations = tokens * activation_bytes(experiment) // _MARGIN
    kept = 0 if on_gpu else _attention_bytes(experiment, rows)
    return states + activations + kept + logits


def _attention_bytes(experiment: Experiment, rows: int) -> int:
    """The probabilities of all layers, which a compiled model does not keep."""
    model, training = experiment.model, experiment.training
    if training.compile:
        return 0
    reduced = training.precision == "bfloat16"
    return sum(
        saved_probability_bytes(
            rows,
            model.n_head,
            model.head_dim,
            model.block_size,
            model.window if kind == "L" else None,
            reduced=reduced,
        )
        for kind in model.layer_kinds
    )
