"""What `model` refuses: settings that contradict each other, or would have no meaning."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlab.sharing import KIND_NAMES, SharingError, owner_map
from kvlab.spec.layer_config import POSITIONS, LatentKV, LayerConfig, LayerKind
from kvlab.spec.spec_model import FieldMessage

if TYPE_CHECKING:
    from kvlab.spec.model_config import ModelConfig

LETTERS_RULE = "may hold only G (global), L (local) and letters of model.kinds"


def find_model_problems(model: "ModelConfig") -> list[FieldMessage]:
    """Return every contradiction in a model's settings."""
    problems = [*_find_letter_problems(model)]
    if problems:
        return problems  # what its layers are is not known
    problems += [
        *_find_head_problems(model),
        *_find_position_problems(model),
        *_find_window_problems(model),
        *_find_kv_problems(model),
    ]
    try:
        owner_map(model.kv_sharing, model.layer_kinds)
    except SharingError as error:
        problems.append(("kv_sharing", str(error)))
    return problems


def _format_divisors(number: int) -> str:
    divisors = [str(n) for n in range(1, min(number, 4096) + 1) if number % n == 0]
    if len(divisors) == 1:
        return divisors[0]
    return f"{', '.join(divisors[:-1])} or {divisors[-1]}"


def _find_letter_problems(model: "ModelConfig") -> Iterator[FieldMessage]:
    """Yield letters without a kind, and settings of kinds without a layer."""
    for letter in dict.fromkeys(model.attention_pattern):
        if letter not in model.kind_settings:
            kinds = f"kinds: {{{letter}: {{position: none}}}}"
            yield "attention_pattern", f"{LETTERS_RULE}; define {letter}, as in {kinds}"
    for kind, (key, own) in model.kind_settings.items():
        is_set = bool(own.model_fields_set) or kind not in KIND_NAMES
        if is_set and kind not in model.attention_pattern:
            fields = (f"{key}.{name}" for name in LayerKind.model_fields
                      if name in own.model_fields_set)  # fmt: skip
            text = f"is of layers {kind}, and attention_pattern {model.attention_pattern} has none"
            yield next(fields, key), f"{text}; use one such as G{kind}, or leave it out"


def _find_head_problems(model: "ModelConfig") -> Iterator[FieldMessage]:
    counts = {"n_kv_head": model.n_kv_head} | {
        f"{key}.n_kv_head": own.n_kv_head
        for key, own in model.kind_settings.values()
        if own.n_kv_head is not None
    }
    for key, count in counts.items():
        if model.n_head % count:
            text = f"does not divide n_head = {model.n_head}; use {_format_divisors(model.n_head)}"
            yield key, text
    if "head_dim" not in model.model_fields_set and model.n_embd % model.n_head:
        text = f"is not a multiple of n_head = {model.n_head}; change one, or set head_dim"
        yield "n_embd", text


def _find_position_problems(model: "ModelConfig") -> Iterator[FieldMessage]:
    for key, own in model.kind_settings.values():
        if own.position is None:
            continue
        if POSITIONS[own.position].has_embedding:
            text = "adds vectors to the tokens, before the first layer; write it as model.position"
            yield f"{key}.position", text
        elif model.position_scheme.has_embedding:
            text = f"is set beside model.position = {model.position}, which every layer sees in"
            yield f"{key}.position", f"{text} the tokens; use rope or none there"
    by_kind = {layer.kind: layer for layer in model.layers}
    for layer in by_kind.values():
        if layer.rope_scaling and layer.rope_scaling.by == "yarn" and layer.rope_theta <= 1:
            key, own = model.kind_settings[layer.kind]
            field = "rope_theta" if own.rope_theta is None else f"{key}.rope_theta"
            yield field, "is not above 1, so no wave is longer than another for yarn to scale"
            break
    problems = {_find_rotation_problem(model, layer) for layer in by_kind.values()}
    yield from sorted(problem for problem in problems if problem is not None)


def _find_rotation_problem(model: "ModelConfig", layer: LayerConfig) -> FieldMessage | None:
    """Return why the dimensions of a layer that are to rotate are no pairs, if they are none."""
    key, own = model.kind_settings[layer.kind]
    position = own.position or model.position
    share = model.rotary_share if own.rotary_share is None else own.rotary_share
    if not POSITIONS[position].is_rotary or not share:
        return None
    if share == 1 and layer.head_dim % 2 == 0:
        return None
    if share == 1:
        is_derived = own.head_dim is None and "head_dim" not in model.model_fields_set
        text = f"is odd{' (n_embd / n_head)' if is_derived else ''}: {layer.head_dim}"
        field = "head_dim" if own.head_dim is None else f"{key}.head_dim"
        return field, f"{text}; {position} rotates pairs, so use an even head_dim"
    rotated = share * layer.head_dim
    if abs(rotated - layer.rotary_dim) < 1e-6 and layer.rotary_dim % 2 == 0:
        return None
    field = "rotary_share" if own.rotary_share is None else f"{key}.rotary_share"
    nearest = 2 * max(1, round(rotated / 2))
    text = f"gives {rotated:.6g} of head_dim = {layer.head_dim}, and pairs rotate"
    return field, f"{text}; use {nearest} / {layer.head_dim} = {nearest / layer.head_dim:.6g}"


def _find_kv_problems(model: "ModelConfig") -> Iterator[FieldMessage]:
    is_rotary = model.position_scheme.is_rotary
    if model.qk_norm and model.kv != "separate":
        text = "normalizes keys before they are stored, and under this kv what is stored is V, too"
        yield "qk_norm", f"{text}; use kv: separate, or leave it out"
    if model.kv in ("separate", "tied"):
        return
    yield from _find_fixed_settings(model)
    if model.kv == "grouped_tied":
        if not is_rotary:
            text = f"needs position: rope, not {model.position}: half of its keys is rotary"
            yield "kv", f"{text}; use tied instead"
        for head_dim in sorted({layer.head_dim for layer in model.layers if layer.head_dim % 4}):
            text = f"needs a head_dim that is a multiple of 4, not {head_dim}"
            yield "kv", f"{text}: half of it is rotated in pairs"
    if not isinstance(model.kv, LatentKV):
        return
    if model.n_kv_head != model.n_head:
        text = f"has no meaning beside kv.latent, so it must be n_head = {model.n_head}"
        yield "n_kv_head", f"{text}; use kv.groups, or leave it out"
    if model.n_head % model.kv.groups:
        text = f"does not divide n_head = {model.n_head}; use {_format_divisors(model.n_head)}"
        yield "kv.groups", text
    if is_rotary and (model.kv.rotary == 0 or model.kv.rotary % 2):
        text = f"is not an even number above 0; {model.position} rotates pairs of this key alone"
        yield "kv.rotary", f"{text}, so use one such as {2 * -(-model.head_dim // 4)}"
    if not is_rotary and model.kv.rotary:
        text = f"needs position: rope, not {model.position}"
        yield "kv.rotary", f"{text}; leave it out"


def _find_fixed_settings(model: "ModelConfig") -> Iterator[FieldMessage]:
    """Yield settings of heads that have no meaning where all heads share a rotary key."""
    if model.rotary_share != 1:
        yield (
            "rotary_share",
            "has no meaning beside this kv, whose shared key rotates; leave it out",
        )
    fixed = ("position", "rotary_share", *(["n_kv_head"] if isinstance(model.kv, LatentKV) else []))
    for key, own in model.kind_settings.values():
        for name in fixed:
            if getattr(own, name) is not None:
                text = "is the same in all layers under this kv, which has a key for all heads"
                yield f"{key}.{name}", f"{text}; leave it out"


def _find_window_problems(model: "ModelConfig") -> Iterator[FieldMessage]:
    if model.sink_tokens and all(layer.window is None for layer in model.layers):
        text = "stay visible beside a window, and no layer has one"
        yield "sink_tokens", f"{text}; set window and attention_pattern, or leave it out"
    kinds, (_, local) = model.layer_kinds, model.kind_settings["L"]
    if model.window is None and local.window is None and "L" in kinds:
        text = "has local layers (L) but no window; set model.window to the tokens that they see"
        yield "attention_pattern", text
    if model.window is not None and "L" not in kinds:
        pattern = re.sub("^G+$", "GLLLLL", model.attention_pattern)
        text = f"needs local layers, and attention_pattern {model.attention_pattern} gives none"
        yield "window", f"{text} on {model.n_layer} layers; use one such as {pattern}"
