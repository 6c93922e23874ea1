"""Initialize a model from another's weights, also into a smaller K/V (uptraining).

K/V heads are mean-pooled into fewer, which the grouped-query attention paper (arXiv 2305.13245,
section 2.1) finds better than picking one or drawing new ones. An owner's projections are averaged
over the layers that will share them. Everything else is copied where it fits. Between models that
store their tokens in different forms (``model.kv``) queries are copied, and K/V start fresh.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvlab.model.gpt import GPT
from kvlab.spec.layer_config import LayerConfig
from kvlab.spec.model_config import ModelConfig


@dataclass
class Conversion:
    """What became of each parameter of the new model, by name.

    Attributes:
        copied: taken as they are.
        pooled: means of K/V heads.
        averaged: means over layers.
        fresh: parameters that keep their own initial values, with the reason.
        unused: parameters of the source that are used nowhere.
        changed: settings of the model that are not the source's, such as ``rope_theta``, with both.
    """

    copied: list[str] = field(default_factory=list)
    pooled: list[str] = field(default_factory=list)
    averaged: list[str] = field(default_factory=list)
    fresh: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def initialize_from(model: GPT, source: ModelConfig, weights: Mapping[str, Tensor]) -> Conversion:
    """Copy, pool and average weights into ``model``.

    Longer position tables and vocabularies take the rows that the source has and keep their own
    for the rest.

    Args:
        source: configuration of the model whose weights are given.
        weights: its parameters by name.
    """
    conversion = Conversion(changed=_compare_settings(model.config, source))
    for name, parameter in model.named_parameters():
        weight = weights.get(name)
        is_table = "embedding" in name or name == "lm_head.weight"
        if weight is None:
            conversion.fresh[name] = "the source has none"
        elif _find_mixer(model.config, name) != _find_mixer(source, name):
            conversion.fresh[name] = "the source mixes the tokens of this layer in another way"
        elif ".attention.qkv." in name:
            _initialize_qkv(model.config, name, parameter, source, weights, conversion)
        elif _find_latents(model.config, name) != _find_latents(source, name):
            conversion.fresh[name] = "the source's latents differ"
        elif weight.shape == parameter.shape:
            parameter.copy_(weight)
            conversion.copied.append(name)
        elif is_table and weight.shape[1] == parameter.shape[1]:
            rows = min(len(weight), len(parameter))
            parameter[:rows] = weight[:rows]
            conversion.copied.append(name)
            if rows < len(parameter):
                conversion.fresh[f"{name}[{rows}:]"] = f"the source has {rows} rows"
        else:
            shapes = f"{tuple(weight.shape)}, not {tuple(parameter.shape)}"
            conversion.fresh[name] = f"the source's shape is {shapes}"
    used = {*conversion.copied, *conversion.pooled, *conversion.averaged}
    conversion.unused = sorted(name for name in weights if name not in used)
    return conversion


def _compare_settings(model: ModelConfig, source: ModelConfig) -> dict[str, str]:
    """Return the settings that change what equal weights compute, as ``10000, not 100000``."""
    own, other = model.computation(), source.computation()
    changed: dict[str, str] = {}
    for key in sorted((own | other).keys() - {"vocab_size", "block_size"}):
        one, its = own.get(key), other.get(key)
        if isinstance(one, float) and isinstance(its, float):
            is_same = math.isclose(one, its, rel_tol=1e-6)  # a file may round it to float32
        else:
            is_same = one == its
        if not is_same:
            changed[key] = f"{one}, not {its}"
    return changed


def _find_mixer(config: ModelConfig, name: str) -> tuple[object, ...]:
    """Return what the meaning of a parameter depends on beside its shape, if it mixes tokens."""
    if ".attention." not in name:
        return ()
    layer = config.layers[int(name.split(".")[1])]
    heads = () if layer.stores_tokens else (layer.n_head, layer.n_kv_head, layer.head_dim)
    return layer.mixer, *heads


def _find_latents(config: ModelConfig, name: str) -> tuple[object, ...]:
    """Return what the meaning of a parameter that makes or reads latents depends on."""
    if not any(part in name for part in (".attention.kv.", ".attention.q_norm.", ".q_up.")):
        return ()
    layer = config.layers[int(name.split(".")[1])]
    return layer.stored, layer.q_width, layer.n_head


def _list_unpooled(layer: LayerConfig) -> list[tuple[int, int | None]]:
    """Return the size of each part that a token stores, and its count if it is not of heads."""
    return [(part.size, None if part.name == "head" else part.count) for part in layer.stored]


def _initialize_qkv(
    target: ModelConfig,
    name: str,
    parameter: Tensor,
    source: ModelConfig,
    weights: Mapping[str, Tensor],
    conversion: Conversion,
) -> None:
    """Copy the query rows; pool and average the K/V rows into those of the layer's readers."""
    layer = int(name.split(".")[1])
    own, trained = target.layers[layer], source.layers[layer]
    heads = [(model.n_embd, one.n_head, one.head_dim, one.key_dim, one.query_dim)
             for model, one in ((source, trained), (target, own))]  # fmt: skip
    if heads[0] != heads[1]:
        conversion.fresh[name] = "the source's heads differ"
        return
    q_width = own.q_rows
    parameter[:q_width] = weights[name][:q_width]
    if len(parameter) == q_width:  # a consumer: its K/V are averaged into its owner's
        conversion.copied.append(name)
        return
    readers = [i for i, owner in enumerate(target.kv_owners) if owner == layer]
    owners = list(dict.fromkeys(source.kv_owners[i] for i in readers if i < source.n_layer))
    stored = {source.layers[owner].stored for owner in owners}
    reason = ""
    if len(stored) > 1:
        reason = "the source's K/V heads differ between layers"
    elif trained.kv_form.name != own.kv_form.name:
        reason = f"the source stores its K/V as {trained.kv_form.name}, not {own.kv_form.name}"
    elif trained.n_kv_head % own.n_kv_head:
        reason = f"{trained.n_kv_head} K/V heads do not pool into {own.n_kv_head}"
    elif _list_unpooled(trained) != _list_unpooled(own):
        reason = "the source stores vectors of other sizes"
    if reason:
        conversion.fresh[f"{name}[{q_width}:]"] = reason
        conversion.copied.append(name)
        return
    kv_rows = torch.stack([
        weights[name.replace(f".{layer}.", f".{owner}.", 1)][q_width:] for owner in owners
    ]).mean(0)  # fmt: skip
    parts = torch.split(kv_rows, [part.count * part.size for part in trained.stored])
    pooled = [
        rows.reshape(part.count, -1, part.size, *rows.shape[1:]).mean(1).flatten(0, 1)
        for rows, part in zip(parts, own.stored, strict=True)
    ]
    parameter[q_width:] = torch.cat(pooled)
    if len(owners) > 1:
        conversion.averaged.append(name)
    elif trained.stored != own.stored:
        conversion.pooled.append(name)
    else:
        conversion.copied.append(name)
