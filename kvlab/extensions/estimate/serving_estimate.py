"""What one model costs to serve: the exact numbers that `kvlab estimate` prints.

Also the same K/V reductions on models of other sizes.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from kvlab.layout.kv_layout import KVLayout
from kvlab.layout.roofline_model import decode_flops, prefill_flops
from kvlab.sharing import KIND_NAMES
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.experiment import ServedModel
from kvlab.spec.flops import forward_flops, parameter_count
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.presets import PRESET_NOTES, PRESETS
from kvlab.spec.validation_errors import list_field_errors


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
    prefill_flops: int
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
        batch = max(0, (memory - weights) // layout.stored_bytes(1, context, dtype))
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
        prefill_flops=prefill_flops(model, context, layout),
        decode_flops=decode_flops(model, context, layout),
        largest_batch=batch,
        note=PRESET_NOTES.get(served.name.partition(" ")[0], ""),
    )


# Other sizes

RESCALE_PRESETS = ("gpt2", "gpt2-xl", "llama-7b", "video-30b", "gpt3-175b")


class RescaleError(ValueError):
    """The reductions cannot be applied at that size; the text says why."""


def rescale(served: ServedModel, preset: str) -> ServedModel:
    """Return the model of a preset with the K/V reductions of ``served``.

    These are taken over: the number of query heads that share a K/V head (all of them for
    multi-query), what a token stores with its latents in proportion to the heads, the pattern of
    local layers with its windows in tokens, what kinds of layers have of windows and K/V heads,
    the sharing and the serving. Where a key is shared for its rotation, positions are rotary.

    Raises:
        RescaleError: groups or owners name layers by number, heads do not divide or are wider in
            some layers, or a sharing is impossible on that many layers.
    """
    model = served.model
    if not all(isinstance(sharing, str) for sharing in (model.kv_sharing, served.serving.tie)):
        raise RescaleError("its groups name layers by number")
    target = ModelConfig(**PRESETS[preset])
    if len({layer.head_dim for layer in model.layers}) > 1:
        raise RescaleError("the width of its heads differs between layers")
    fields: dict[str, Any] = {
        "n_kv_head": _rescale_kv_heads(model, model.n_kv_head, target),
        "window": model.window,
        "attention_pattern": model.attention_pattern,
        "kv_sharing": model.kv_sharing,
        "sink": model.sink,
        "sink_tokens": model.sink_tokens,
        **_rescale_kv(model, target),
    }
    for kind, (key, own) in model.kind_settings.items():
        kept = {"window": own.window, "mixer": own.mixer}
        settings = {name: value for name, value in kept.items() if value is not None}
        if own.n_kv_head is not None:
            settings["n_kv_head"] = _rescale_kv_heads(model, own.n_kv_head, target)
        if kind not in KIND_NAMES:
            fields.setdefault("kinds", {})[kind] = settings
        elif settings:
            fields[key] = settings
    serving = served.serving.model_dump()
    data = {"name": preset, "model": {**PRESETS[preset], **fields}, "serving": serving}
    try:
        return ServedModel.model_validate(data)
    except ValidationError as error:
        first, *_ = list_field_errors(error, ServedModel, data)
        raise RescaleError(first.message) from None


def _rescale_kv_heads(model: ModelConfig, n_kv_head: int, target: ModelConfig) -> int:
    """Return the K/V heads of ``target`` that as many query heads share as in ``model``."""
    group = model.n_head // n_kv_head
    if n_kv_head == 1:
        return 1
    if target.n_head % group:
        raise RescaleError(f"{target.n_head} heads do not divide into groups of {group}")
    return target.n_head // group


def _rescale_kv(model: ModelConfig, target: ModelConfig) -> dict[str, Any]:
    """Return the fields that say what a token of the target stores."""
    form = model.kv_form.rescale(model.head_dim, target.head_dim)
    if form is None:
        text = f"heads of {target.head_dim} instead of {model.head_dim}"
        raise RescaleError(f"its latents do not scale to {text}")
    fields: dict[str, Any] = {"kv": model.kv if isinstance(model.kv, str) else form}
    if form.shares_rotary_key and model.position_scheme.is_rotary:
        fields["position"] = model.position
    return fields
