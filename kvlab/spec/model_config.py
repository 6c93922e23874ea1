"""`model` of an experiment: the shape of one transformer. Also the table of position schemes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kvlab.sharing import PATTERNS, SharingError, owner_map
from kvlab.spec.layer_config import KVField, LatentKV, LayerConfig
from kvlab.spec.presets import PRESETS
from kvlab.spec.spec_model import (
    FieldMessage,
    OneOf,
    PositiveFloat,
    PositiveInt,
    SpecModel,
    TextRule,
    raise_problems,
)


@dataclass(frozen=True)
class PositionScheme:
    """What the spec, the arithmetic and the model need to know of a position scheme.

    Attributes:
        has_embedding: a learned vector for each of ``block_size`` positions is added to the
            tokens, so there is no position beyond them.
        is_rotary: pairs of query and key dimensions are rotated: ``head_dim`` is even, and
            ``rope_theta`` counts.
    """

    has_embedding: bool = False
    is_rotary: bool = False


POSITIONS: dict[str, PositionScheme] = {
    "learned": PositionScheme(has_embedding=True),
    "rope": PositionScheme(is_rotary=True),
    "none": PositionScheme(),
}
"""`model.position` -> its scheme: the one table of position schemes."""


def _validate_sharing(value: Any) -> Any:
    """Convert lists to tuples, so that a frozen model stays frozen."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value:
        if all(type(item) is int for item in value):
            return tuple(value)
        if all(
            isinstance(item, list | tuple) and all(type(layer) is int for layer in item)
            for item in value
        ):
            return tuple(tuple(item) for item in value)
    text = "is not a pattern, groups or owners; use one such as adjacent:2 or [[0, 6], [1, 2]]"
    raise PydanticCustomError("sharing", "{text}", {"text": text})


SharingField = Annotated[
    str | tuple[tuple[int, ...], ...] | tuple[int, ...], BeforeValidator(_validate_sharing)
]
_LAYER_KINDS = TextRule(
    r"^[GL]{1,10000}$", "may hold only G (global) and L (local); use one such as GLLLLL"
)


class ModelConfig(SpecModel):
    """One transformer of the GPT-2 family. A preset fills what is not written.

    ``n_kv_head = n_head`` is multi-head attention, 1 multi-query (arXiv 1911.02150), between
    them grouped-query (arXiv 2305.13245). ``attention_pattern`` holds one letter a layer, G
    for global and L for local, tiled over the depth; a token of a local layer sees ``window``
    tokens, itself included. ``kv_sharing`` is cross-layer attention, trained that way.
    """

    vocab_size: PositiveInt = Field(
        default=50257,
        description="Tokens in the vocabulary; at least those of data.tokenizer.",
        examples=[50304],
        json_schema_extra={"unit": "tokens"},
    )
    block_size: PositiveInt = Field(
        default=1024,
        description="Context length.",
        examples=[512],
        json_schema_extra={"unit": "tokens"},
    )
    n_layer: PositiveInt = Field(
        default=12,
        le=10_000,
        description="Transformer layers.",
        examples=[6],
        json_schema_extra={"unit": "layers"},
    )
    n_head: PositiveInt = Field(
        default=12,
        le=10_000,
        description="Query heads a layer.",
        examples=[4],
        json_schema_extra={"unit": "heads"},
    )
    n_kv_head: PositiveInt = Field(
        default_factory=lambda fields: fields.get("n_head", 1),
        description="K/V heads a layer: n_head is multi-head attention, 1"
        " multi-query, a divisor between them grouped-query.",
        examples=[1],
        json_schema_extra={"unit": "heads", "computed_default": "n_head"},
    )
    n_embd: PositiveInt = Field(
        default=768,
        le=10**6,
        description="Width of the residual stream.",
        examples=[1536],
        json_schema_extra={"unit": "dimensions"},
    )
    head_dim: PositiveInt = Field(
        default_factory=lambda fields: max(1, fields.get("n_embd", 1) // fields.get("n_head", 1)),
        description="Width of a head.",
        examples=[128],
        json_schema_extra={"unit": "dimensions", "computed_default": "n_embd / n_head"},
    )
    mlp: Literal["gelu", "swiglu"] = Field(
        default="gelu", description="Activation of the MLP.", examples=["swiglu"]
    )
    ffn_dim: PositiveInt = Field(
        default_factory=lambda fields: _default_ffn_dim(
            fields.get("mlp", "gelu"), fields.get("n_embd", 1)
        ),
        description="Hidden width of the MLP.",
        examples=[2048],
        json_schema_extra={
            "unit": "dimensions",
            "computed_default": "4 n_embd; under swiglu 8/3 n_embd, rounded up to a multiple of 64",
        },
    )
    position: Annotated[str, OneOf(lambda: POSITIONS)] = Field(
        default="learned",
        description="How positions enter: a learned vector for each, rotary"
        " embedding (arXiv 2104.09864), or not at all.",
        examples=["rope"],
    )
    rope_theta: PositiveFloat = Field(
        default=10_000.0,
        description="Base of the rotary frequencies.",
        examples=[500000],
        json_schema_extra={"unit": "none", "given": {"position": "rope"}},
    )
    norm: Literal["layernorm", "rmsnorm"] = Field(
        default="layernorm",
        description="Normalization before attention, before the MLP and at the end.",
        examples=["rmsnorm"],
    )
    norm_eps: PositiveFloat = Field(
        default=1e-5,
        description="Added to the variance before its root is taken.",
        examples=[1e-06],
        json_schema_extra={"unit": "none"},
    )
    bias: bool = Field(
        default=True, description="Biases in linear layers and layer norms.", examples=[False]
    )
    tie_embeddings: bool = Field(
        default=True, description="The head reuses the token embedding.", examples=[False]
    )
    window: PositiveInt | None = Field(
        default=None,
        description="Tokens that a token of a local layer sees, itself included.",
        examples=[256],
        json_schema_extra={"unit": "tokens", "given": {"attention_pattern": "GLLLLL"}},
    )
    attention_pattern: Annotated[str, _LAYER_KINDS] = Field(
        default="G",
        description="G (global) or L (local) a layer, tiled over depth.",
        examples=["GLLLLL"],
        json_schema_extra={"given": {"window": 256}},
    )
    kv_sharing: SharingField = Field(
        default="none",
        description="Cross-layer K/V sharing in training and serving: "
        f"{', '.join(pattern.usage for pattern in PATTERNS.values())},"
        " groups [[0, 6], [1, 2]] or owners [0, 0, 2].",
        examples=["adjacent:2"],
    )

    kv: KVField = Field(
        default="separate",
        description="What a token stores: K and V (separate), one tensor that is both (tied),"
        " one tensor that is V and half of K beside a shared rotary key (grouped_tied, GTA), or"
        " latent vectors that K and V are mapped from (a map; MLA and GLA).",
        examples=["tied"],
        json_schema_extra={"given": {"position": "rope"}},
    )

    omitted_defaults: ClassVar[Mapping[str, Any]] = {"kv": "separate"}

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "preset" not in data:
            return data
        name = data["preset"]
        if not isinstance(name, str) or name not in PRESETS:
            near = get_close_matches(str(name), PRESETS, 1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(PRESETS)}"
            raise_problems([("preset", f"is not a preset; {hint}")])
        return PRESETS[name] | {key: value for key, value in data.items() if key != "preset"}

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        problems = [
            *_find_head_problems(self),
            *_find_position_problems(self),
            *_find_window_problems(self),
            *_find_kv_problems(self),
        ]
        try:
            owner_map(self.kv_sharing, self.layer_kinds)
        except SharingError as error:
            problems.append(("kv_sharing", str(error)))
        raise_problems(problems)
        return self

    @property
    def position_scheme(self) -> PositionScheme:
        """The entry of ``position`` in `POSITIONS`."""
        return POSITIONS[self.position]

    @cached_property
    def layer_kinds(self) -> str:
        """One letter a layer: ``attention_pattern`` tiled over ``n_layer``."""
        repeats = -(-self.n_layer // len(self.attention_pattern))
        return (self.attention_pattern * repeats)[: self.n_layer]

    @cached_property
    def kv_owners(self) -> tuple[int, ...]:
        """For every layer the layer whose K/V projections it reads."""
        return owner_map(self.kv_sharing, self.layer_kinds)

    @cached_property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The attention of every layer."""
        by_kind = {kind: self._resolve_layer(kind) for kind in set(self.layer_kinds)}
        return tuple(by_kind[kind] for kind in self.layer_kinds)

    @property
    def stored_sizes(self) -> tuple[int, ...]:
        """The sizes of the vectors that a token stores, each once, over all layers."""
        return tuple(sorted({one.size for layer in self.layers for one in layer.stored}))

    def _resolve_layer(self, kind: str) -> LayerConfig:
        kv = self.kv
        latent = kv if isinstance(kv, LatentKV) else None
        rotary_dim = self.head_dim if self.position_scheme.is_rotary else 0
        if latent is not None:
            rotary_dim = latent.rotary
        elif kv == "grouped_tied":
            rotary_dim = self.head_dim // 2
        return LayerConfig(
            kind=kind,
            n_head=self.n_head,
            n_kv_head=self.n_kv_head if latent is None else latent.groups,
            head_dim=self.head_dim,
            window=self.window if kind == "L" else None,
            rotary_dim=rotary_dim,
            rope_theta=self.rope_theta,
            kv="latent" if isinstance(kv, LatentKV) else kv,
            latent_dim=0 if latent is None else latent.latent,
            query_dim=0 if latent is None else latent.query or 0,
        )

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> "ModelConfig":
        """Return a copy with changed fields, without what was computed from the old ones."""
        copy = super().model_copy(update=update, deep=deep)
        for name in ("layer_kinds", "kv_owners", "layers"):
            copy.__dict__.pop(name, None)
        return copy

    def computation(self) -> dict[str, Any]:
        """Return what the model computes, as plain data, equal for all spellings of it.

        Sharing counts as the owner map, the attention pattern as one letter a layer, and a
        window that holds the whole block as none.
        """
        facts = self.identity()
        del facts["kv_sharing"], facts["attention_pattern"]
        kinds = self.layer_kinds
        if self.window is not None and self.window >= self.block_size:
            facts["window"], kinds = None, "G" * self.n_layer
        if not self.position_scheme.is_rotary:
            del facts["rope_theta"]
        return {**facts, "owners": list(self.kv_owners), "kinds": kinds}


def _default_ffn_dim(mlp: str, n_embd: int) -> int:
    if mlp == "gelu":
        return 4 * n_embd
    return -(-8 * n_embd // (3 * 64)) * 64


def _format_divisors(number: int) -> str:
    divisors = [str(n) for n in range(1, min(number, 4096) + 1) if number % n == 0]
    if len(divisors) == 1:
        return divisors[0]
    return f"{', '.join(divisors[:-1])} or {divisors[-1]}"


def _find_head_problems(model: ModelConfig) -> Iterator[FieldMessage]:
    if model.n_head % model.n_kv_head:
        text = f"does not divide n_head = {model.n_head}; use {_format_divisors(model.n_head)}"
        yield "n_kv_head", text
    if "head_dim" not in model.model_fields_set and model.n_embd % model.n_head:
        text = f"is not a multiple of n_head = {model.n_head}; change one, or set head_dim"
        yield "n_embd", text


def _find_position_problems(model: ModelConfig) -> Iterator[FieldMessage]:
    if model.position_scheme.is_rotary and model.head_dim % 2:
        derived = "" if "head_dim" in model.model_fields_set else " (n_embd / n_head)"
        text = f"is odd{derived}: {model.head_dim}; {model.position} rotates pairs"
        yield "head_dim", f"{text}, so use an even head_dim"


def _find_kv_problems(model: ModelConfig) -> Iterator[FieldMessage]:
    is_rotary = model.position_scheme.is_rotary
    if model.kv == "grouped_tied":
        if not is_rotary:
            text = f"needs position: rope, not {model.position}: half of its keys is rotary"
            yield "kv", f"{text}; use tied instead"
        elif model.head_dim % 4:
            text = f"needs a head_dim that is a multiple of 4, not {model.head_dim}"
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


def _find_window_problems(model: ModelConfig) -> Iterator[FieldMessage]:
    kinds = model.layer_kinds
    if model.window is None and "L" in kinds:
        text = "has local layers (L) but no window; set model.window to the tokens that they see"
        yield "attention_pattern", text
    if model.window is not None and "L" not in kinds:
        local = re.sub("^G+$", "GLLLLL", model.attention_pattern)
        text = f"needs local layers, and attention_pattern {model.attention_pattern} gives none"
        yield "window", f"{text} on {model.n_layer} layers; use one such as {local}"
