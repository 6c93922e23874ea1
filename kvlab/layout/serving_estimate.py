"""What one model costs to serve: the exact numbers that `kvlab estimate` prints."""

from dataclasses import dataclass

from kvlab.layout.kv_layout import KVLayout
from kvlab.layout.roofline_model import decode_flops
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.experiment import ServedModel
from kvlab.spec.flops import forward_flops, parameter_count
from kvlab.spec.presets import PRESET_NOTES


@dataclass(frozen=True)
class ServingEstimate:
    """Exact sizes of a model's KV cache and weights at one batch size and context length.

    ``dtype`` is the model's, ``kv_dtype`` the one that K and V are stored in. ``note`` says what a
    preset leaves out of the published model.
    """

    name: str
    dtype: str
    kv_dtype: str
    batch_size: int
    context_length: int
    layers: int
    slots: int
    kv_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_token_at_limit: int
    kv_bytes_read_per_token: int
    kv_bytes_written_per_token: int
    formula: str
    parameters: int
    weight_bytes: int
    forward_flops: int
    decode_flops: int
    largest_batch: int | None
    note: str = ""


def estimate_serving(
    served: ServedModel,
    *,
    batch_size: int = 1,
    context_length: int | None = None,
    dtype: str = "float32",
    memory: int | None = None,
) -> ServingEstimate:
    """Return the numbers of one model and how it is served.

    Args:
        context_length: default the model's block size.
        memory: bytes that weights and cache may take together; gives ``largest_batch``.
    """
    model, layout = served.model, KVLayout.of(served.model, served.serving)
    context = context_length or model.block_size
    parameters = parameter_count(model)
    weights = parameters * DTYPES[dtype].item_bytes
    batch = None
    if memory is not None:
        batch = max(0, layout.largest_batch(memory - weights, context, dtype))
    return ServingEstimate(
        name=served.name,
        dtype=dtype,
        kv_dtype=layout.storage_dtype(dtype),
        batch_size=batch_size,
        context_length=context,
        layers=model.n_layer,
        slots=len(layout.slots),
        kv_bytes=layout.stored_bytes(batch_size, context, dtype),
        kv_bytes_per_token=layout.bytes_per_token(dtype),
        kv_bytes_per_token_at_limit=layout.bytes_per_token_at_limit(dtype),
        kv_bytes_read_per_token=layout.read_bytes(batch_size, context, dtype),
        kv_bytes_written_per_token=layout.written_bytes(batch_size, dtype),
        formula=layout.formula(batch_size, context, dtype),
        parameters=parameters,
        weight_bytes=weights,
        forward_flops=forward_flops(model, context),
        decode_flops=decode_flops(model, context, layout),
        largest_batch=batch,
        note=PRESET_NOTES.get(served.name.partition(" ")[0], ""),
    )
