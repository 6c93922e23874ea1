"""Starting one model from another's weights, also into a smaller K/V (uptraining).

Heads are mean-pooled into fewer K/V heads, which the grouped-query attention paper (arXiv
2305.13245, section 2.1) finds better than picking one or starting anew; an owner's projections
are averaged over the layers that will share them. Everything else is copied where it fits.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlab.model.gpt import GPT
from kvlab.spec.model_config import ModelConfig


@dataclass
class Conversion:
    """What became of each parameter of the new model, by name.

    ``fresh`` ones keep their own initialisation, with the reason; ``unused`` are the source's
    that found no place.
    """

    copied: list[str] = field(default_factory=list)
    pooled: list[str] = field(default_factory=list)
    averaged: list[str] = field(default_factory=list)
    fresh: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def initialize_from(model: GPT, source: ModelConfig, weights: Mapping[str, Tensor]) -> Conversion:
    """Copies, pools and averages ``weights`` of a model ``source`` into ``model``.

    Longer position tables and vocabularies take what is there and keep their own rest.
    """
    report = Conversion()
    for name, parameter in model.named_parameters():
        if ".attention.qkv." in name:
            _initialize_qkv(model, name, parameter, source, weights, report)
        elif name not in weights:
            report.fresh[name] = "the source has none"
        elif weights[name].shape == parameter.shape:
            parameter.copy_(weights[name])
            report.copied.append(name)
        elif "embedding" in name or name == "lm_head.weight":
            _copy_leading_rows(name, parameter, weights[name], report)
        else:
            report.fresh[name] = _shape_mismatch(weights[name], parameter)
    used = {*report.copied, *report.pooled, *report.averaged}
    report.unused = sorted(name for name in weights if name not in used)
    return report


def _copy_leading_rows(name: str, parameter: Tensor, given: Tensor, report: Conversion) -> None:
    if given.shape[1] != parameter.shape[1]:
        report.fresh[name] = _shape_mismatch(given, parameter)
        return
    rows = min(len(given), len(parameter))
    parameter[:rows] = given[:rows]
    report.copied.append(name)
    if rows < len(parameter):
        report.fresh[f"{name}[{rows}:]"] = f"the source has {rows} rows"


def _initialize_qkv(
    model: GPT,
    name: str,
    parameter: Tensor,
    source: ModelConfig,
    weights: Mapping[str, Tensor],
    report: Conversion,
) -> None:
    layer = int(name.split(".")[1])
    target = model.config
    queries = target.n_head * target.head_dim
    fits = (source.n_head, source.head_dim, source.n_embd) == (
        target.n_head,
        target.head_dim,
        target.n_embd,
    )
    if name not in weights or not fits:
        report.fresh[name] = (
            "the source's heads differ" if name in weights else "the source has none"
        )
        return
    parameter[:queries] = weights[name][:queries]
    if len(parameter) == queries:  # a consumer: its K/V went into its owner's
        report.copied.append(name)
        return
    if source.n_kv_head % target.n_kv_head:
        ratio = f"{source.n_kv_head} K/V heads do not pool into {target.n_kv_head}"
        report.fresh[f"{name}[{queries}:]"] = ratio
        report.copied.append(name)
        return
    readers = [i for i, owner in enumerate(target.kv_owners) if owner == layer]
    owners = list(dict.fromkeys(source.kv_owners[i] for i in readers if i < source.n_layer))
    rows = torch.stack([weights[_name_in_layer(name, owner)][queries:] for owner in owners]).mean(0)
    parameter[queries:] = _pool_kv_heads(rows, source, target.n_kv_head)
    if len(owners) > 1:
        report.averaged.append(name)
    elif source.n_kv_head != target.n_kv_head:
        report.pooled.append(name)
    else:
        report.copied.append(name)


def _name_in_layer(name: str, layer: int) -> str:
    _, _, rest = name.split(".", 2)
    return f"blocks.{layer}.{rest}"


def _pool_kv_heads(rows: Tensor, source: ModelConfig, heads: int) -> Tensor:
    """K then V rows, ``n_kv_head * head_dim`` each, means of consecutive heads."""
    shape = (2, heads, source.n_kv_head // heads, source.head_dim, *rows.shape[1:])
    return rows.reshape(shape).mean(2).flatten(0, 2)


def _shape_mismatch(given: Tensor, wanted: Tensor) -> str:
    return f"the source's shape is {tuple(given.shape)}, not {tuple(wanted.shape)}"
