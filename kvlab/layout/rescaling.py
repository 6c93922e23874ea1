"""The same K/V reductions on models of other sizes."""

from typing import Any

from pydantic import ValidationError

from kvlab.sharing import KIND_NAMES
from kvlab.spec.experiment import ServedModel
from kvlab.spec.layer_config import LatentKV
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.presets import PRESETS
from kvlab.spec.validation_errors import list_field_errors

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
        settings = {} if own.window is None else {"window": own.window}
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
    if model.kv == "separate":
        return {}
    fields: dict[str, Any] = {"kv": model.kv}
    if isinstance(model.kv, LatentKV):
        sizes = {name: size for name, size in model.kv.model_dump().items() if size}
        groups = sizes.pop("groups")
        if any(size * target.head_dim % model.head_dim for size in sizes.values()):
            text = f"heads of {target.head_dim} instead of {model.head_dim}"
            raise RescaleError(f"its latents do not scale to {text}")
        scaled = {name: n * target.head_dim // model.head_dim for name, n in sizes.items()}
        fields["kv"] = {**scaled, "groups": groups}
    if model.kv != "tied" and model.position_scheme.is_rotary:
        fields["position"] = model.position
    return fields
