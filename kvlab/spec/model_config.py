"""`model` of an experiment: the shape of one transformer."""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvlab.sharing import PATTERNS, owner_map
from kvlab.spec.layer_config import (
    POSITIONS,
    KVField,
    LatentKV,
    LayerConfig,
    LayerKind,
    PositionScheme,
    RopeScaling,
    RotaryShare,
)
from kvlab.spec.model_rules import LETTERS_RULE, find_model_problems
from kvlab.spec.presets import PRESETS
from kvlab.spec.spec_model import (
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    SpecModel,
    TextRule,
    raise_problems,
)


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
_LAYER_LETTERS = TextRule(r"^[A-Z]{1,10000}$", f"{LETTERS_RULE}; use one such as GLLLLL")
KindLetter = Annotated[
    str, TextRule(r"^[A-FH-KM-Z]$", "is not a free letter; use one of A to Z but G and L")
]
MLPS = {"gelu": False, "swiglu": True, "geglu": True}
"""`model.mlp` -> whether a gate multiplies the values, so that ``up`` has twice the rows."""

_SETTINGS_BY_KIND: dict[str, Any] = {
    "position": "rope",
    "window": 256,
    "attention_pattern": "GLLLLL",
}


class ModelConfig(SpecModel):
    """One transformer of the GPT-2 family. A preset fills what is not written.

    ``n_kv_head = n_head`` is multi-head attention, 1 multi-query (arXiv 1911.02150), between
    them grouped-query (arXiv 2305.13245). ``attention_pattern`` holds one letter a layer, G
    for global and L for local, tiled over the depth; a token of a local layer sees ``window``
    tokens, itself included. ``local``, ``global`` and ``kinds`` set what layers of one kind have
    of their own. ``kv_sharing`` is cross-layer attention, trained that way.
    """

    model_config = ConfigDict(serialize_by_alias=True)
    omitted_defaults: ClassVar[Mapping[str, Any]] = {
        "kv": "separate",
        "rotary_share": 1.0,
        "rope_scaling": None,
        "qk_norm": False,
        "norm_placement": "pre",
        "attention_scale": None,
        "embedding_scale": 1.0,
        "sink": "none",
        "sink_tokens": 0,
        "local": None,
        "global": None,
        "kinds": {},
    }

    vocab_size: PositiveInt = 50257
    """Tokens in the vocabulary; at least those of data.tokenizer. Unit: tokens. Example: 50304"""
    block_size: PositiveInt = 1024
    """Context length. Unit: tokens. Example: 512"""
    n_layer: Annotated[PositiveInt, Field(le=10_000)] = 12
    """Transformer layers. Unit: layers. Example: 6"""
    n_head: Annotated[PositiveInt, Field(le=10_000)] = 12
    """Query heads a layer. Unit: heads. Example: 4"""
    n_kv_head: PositiveInt = Field(default_factory=lambda fields: fields.get("n_head", 1))
    """K/V heads a layer: n_head is multi-head attention, 1 multi-query, a divisor between them
    grouped-query.
    Unit: heads. Default: n_head. Example: 1"""
    n_embd: Annotated[PositiveInt, Field(le=10**6)] = 768
    """Width of the residual stream. Unit: dimensions. Example: 1536"""
    head_dim: PositiveInt = Field(
        default_factory=lambda fields: max(1, fields.get("n_embd", 1) // fields.get("n_head", 1))
    )
    """Width of a head. Unit: dimensions. Default: n_embd / n_head. Example: 128"""
    mlp: Annotated[str, OneOf(lambda: MLPS)] = "gelu"
    """Activation of the MLP: a GELU in its tanh form (gelu), or a gate beside the values (arXiv
    2002.05202) with a SiLU (swiglu) or a GELU (geglu).
    Example: swiglu"""
    ffn_dim: PositiveInt = Field(
        default_factory=lambda fields: _default_ffn_dim(
            fields.get("mlp", "gelu"), fields.get("n_embd", 1)
        )
    )
    """Hidden width of the MLP.
    Unit: dimensions. Default: 4 n_embd; with a gate 8/3 n_embd, rounded up to a multiple of 64.
    Example: 2048"""
    position: Annotated[str, OneOf(lambda: POSITIONS)] = "learned"
    """How positions enter: a learned vector for each, rotary embedding (arXiv 2104.09864), or not
    at all.
    Example: rope"""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary frequencies. Unit: none. Example: 500000, position: rope"""
    rotary_share: RotaryShare = 1.0
    """The part of a head that rotates, its leading dimensions as in GPT-NeoX (arXiv 2204.06745): 0
    is none.
    Unit: none. Example: 0.25, position: rope"""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, for a longer context than they were trained on.
    Example: {by: yarn, factor: 4, original: 256}, position: rope"""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalization before attention, before the MLP and at the end. Example: rmsnorm"""
    norm_placement: Literal["pre", "sandwich"] = "pre"
    """Where a layer normalizes: before attention and MLP, or also what they return, before it is
    added (sandwich, as in Gemma 3, arXiv 2503.19786).
    Example: sandwich"""
    qk_norm: bool = False
    """An RMS norm of each head's queries and one of its keys, before they are rotated and stored
    (arXiv 2302.05442), as in Qwen3 and Gemma 3. Stored keys then have a bounded length, which
    matters to coarse caches.
    Example: true"""
    attention_scale: PositiveFloat | None = None
    """What attention scores are multiplied by.
    Unit: none. Default: 1 / sqrt(width of a head's keys). Example: 0.0625"""
    embedding_scale: PositiveFloat = 1.0
    """What the embeddings of tokens are multiplied by as they enter the first layer; Gemma 3 has
    sqrt(n_embd).
    Unit: none. Example: 27.7"""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance before its root is taken. Unit: none. Example: 1e-6"""
    bias: bool = True
    """Biases in linear layers and layer norms. Example: false"""
    tie_embeddings: bool = True
    """The head reuses the token embedding. Example: false"""
    window: PositiveInt | None = None
    """Tokens that a token of a local layer sees, itself included.
    Unit: tokens. Example: 256, attention_pattern: GLLLLL"""
    sink: Literal["none", "learned"] = "none"
    """A learned logit of each query head that joins the denominator of its softmax, as in gpt-oss
    (arXiv 2508.10925), so that a head may attend to nothing. It stores no bytes.
    Example: learned"""
    sink_tokens: NonNegativeInt = 0
    """The first tokens of a text, or of a packed document, that local layers see beside their
    window (StreamingLLM, arXiv 2309.17453), in training and in the cache. They keep their
    positions.
    Unit: tokens. Example: 4, window: 256, attention_pattern: GLLLLL"""
    attention_pattern: Annotated[str, _LAYER_LETTERS] = "G"
    """G (global), L (local) or a letter of `kinds` a layer, tiled over depth.
    Example: GLLLLL, window: 256"""
    local: LayerKind | None = None
    """Settings of the local layers (L) alone.
    Example: {n_kv_head: 1}, position: rope, window: 256, attention_pattern: GLLLLL"""
    global_: LayerKind | None = Field(default=None, alias="global")
    """Settings of the global layers (G) alone; with a window they are local, too.
    Example: {rope_theta: 1e6}, position: rope, window: 256, attention_pattern: GLLLLL"""
    kinds: dict[KindLetter, LayerKind] = {}
    """More letters of attention_pattern, and the settings of their layers. A kind with a window is
    local, one without is global.
    Example: {N: {position: none}}, position: rope, attention_pattern: GGGN"""
    kv_sharing: Annotated[
        SharingField,
        Field(
            description="Cross-layer K/V sharing in training and serving: "
            f"{', '.join(pattern.usage for pattern in PATTERNS.values())},"
            " groups [[0, 6], [1, 2]] or owners [0, 0, 2]."
        ),
    ] = "none"
    """Example: 'adjacent:2'"""

    kv: KVField = "separate"
    """What a token stores: K and V (separate), one tensor that is both (tied), one tensor that is V
    and half of K beside a shared rotary key (grouped_tied, GTA), or latent vectors that K and V are
    mapped from (a map; MLA and GLA).
    Example: tied, position: rope"""

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
        raise_problems(find_model_problems(self))
        return self

    @property
    def position_scheme(self) -> PositionScheme:
        """The entry of ``position`` in `POSITIONS`."""
        return POSITIONS[self.position]

    @property
    def mlp_matrices(self) -> int:
        """Matrices of ``n_embd`` x ``ffn_dim`` numbers in an MLP."""
        return 3 if MLPS[self.mlp] else 2

    @property
    def norms_per_layer(self) -> int:
        """Norms of the residual stream in a layer."""
        return 4 if self.norm_placement == "sandwich" else 2

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
    def stored_sizes(self) -> dict[int, str]:
        """The sizes of the vectors that a token stores, and of what they are, over all layers."""
        names = {one.size: one.name for layer in self.layers for one in layer.stored}
        return {size: names[size] for size in sorted(names)}

    @cached_property
    def kind_settings(self) -> dict[str, tuple[str, LayerKind]]:
        """The key and the settings of every kind that has a letter."""
        built_in = {"G": ("global", self.global_), "L": ("local", self.local)}
        settings = {kind: (key, own or LayerKind()) for kind, (key, own) in built_in.items()}
        return settings | {kind: (f"kinds.{kind}", own) for kind, own in self.kinds.items()}

    def _resolve_layer(self, kind: str) -> LayerConfig:
        kv, (_, own) = self.kv, self.kind_settings[kind]
        latent = kv if isinstance(kv, LatentKV) else None
        head_dim = own.head_dim or self.head_dim
        position = own.position or self.position
        share = self.rotary_share if own.rotary_share is None else own.rotary_share
        scheme = POSITIONS[position]
        rotary_dim = round(share * head_dim) if scheme.is_rotary else 0
        is_none = scheme.is_rotary and not scheme.has_embedding and not rotary_dim
        if latent is not None:
            rotary_dim = latent.rotary
        elif kv == "grouped_tied":
            rotary_dim = head_dim // 2
        window = own.window or (self.window if kind == "L" else None)
        return LayerConfig(
            kind=kind,
            position="none" if is_none else position,
            n_head=self.n_head,
            n_kv_head=(own.n_kv_head or self.n_kv_head) if latent is None else latent.groups,
            head_dim=head_dim,
            window=window,
            rotary_dim=rotary_dim,
            rope_theta=own.rope_theta or self.rope_theta,
            kv="latent" if isinstance(kv, LatentKV) else kv,
            latent_dim=0 if latent is None else latent.latent,
            query_dim=0 if latent is None else latent.query or 0,
            has_sink=self.sink == "learned",
            sink_tokens=0 if window is None else self.sink_tokens,
            rope_scaling=(own.rope_scaling or self.rope_scaling) if rotary_dim else None,
            has_qk_norm=self.qk_norm,
            attention_scale=self.attention_scale,
        )

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> "ModelConfig":
        """Return a copy with changed fields, without what was computed from the old ones."""
        copy = super().model_copy(update=update, deep=deep)
        for name in ("layer_kinds", "kv_owners", "layers", "kind_settings"):
            copy.__dict__.pop(name, None)
        return copy

    def computation(self) -> dict[str, Any]:
        """Return what the model computes, as plain data, equal for all spellings of it.

        Sharing counts as the owner map, and settings by kind as what each layer has: one value
        where all layers that it counts for agree, else a list. A window that holds the whole
        block, with the sinks beside it, is none.
        """
        facts, layers = self.identity(), self.layers
        for key in ("kv_sharing", "attention_pattern", "local", "global", "kinds", "rotary_share"):
            facts.pop(key, None)
        windows = [_bound_window(layer, self.block_size) for layer in layers]
        thetas = [layer.rope_theta if layer.rotary_dim else None for layer in layers]
        shares = [layer.rotary_share or None for layer in layers]
        facts |= {
            "n_kv_head": _collapse([layer.n_kv_head for layer in layers]),
            "head_dim": _collapse([layer.head_dim for layer in layers]),
            "position": _collapse([layer.position for layer in layers]),
            "window": _collapse(windows),
            "owners": list(self.kv_owners),
            "kinds": "".join("G" if window is None else "L" for window in windows),
        }
        del facts["rope_theta"]
        facts.pop("rope_scaling", None)
        scalings = [layer.rope_scaling for layer in layers]
        if any(scalings):
            facts["rope_scaling"] = _collapse(
                [scaling and scaling.model_dump_json() for scaling in scalings]
            )
        if any(thetas):
            facts["rope_theta"] = _collapse(thetas)
        if any(shares) and _collapse(shares) != 1:
            facts["rotary_share"] = _collapse(shares)
        if not any(windows):
            facts.pop("sink_tokens", None)
        return facts


def _bound_window(layer: LayerConfig, block_size: int) -> int | None:
    """Return the window of a layer, or None if it sees the whole block."""
    return layer.window if layer.visible_tokens(block_size) < block_size else None


def _collapse(values: list[Any]) -> Any:
    """Return the one value that layers have, leaving out those for which it is None; else all."""
    different = {value for value in values if value is not None}
    if len(different) > 1:
        return values
    return next(iter(different), None)


def _default_ffn_dim(mlp: str, n_embd: int) -> int:
    if not MLPS.get(mlp):
        return 4 * n_embd
    return -(-8 * n_embd // (3 * 64)) * 64
