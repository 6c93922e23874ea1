"""`model` of an experiment: the shape of one transformer."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from kvlab.errors import PretrainedError
from kvlab.humanize import suggest_name
from kvlab.own_extensions import explain_missing
from kvlab.sharing import KIND_NAMES, PATTERNS, SharingError, owner_map
from kvlab.spec import layer_config
from kvlab.spec import spec_model as spec
from kvlab.spec.checkpoint_tools import find_checkpoint_tool
from kvlab.spec.kv_forms import NAMED_FORMS, KVField, KVForm
from kvlab.spec.mixers import ATTENTION, find_mixer, list_letters
from kvlab.spec.presets import PRESETS


def _validate_sharing(value: Any, handler: Callable[[Any], Any]) -> Any:
    try:
        return handler(value)
    except ValidationError:
        text = "is not a pattern, groups or owners; use one such as adjacent:2 or [[0, 6], [1, 2]]"
        raise PydanticCustomError("sharing", "{text}", {"text": text}) from None


SharingField = Annotated[
    str
    | Annotated[spec.TupleOf[spec.TupleOf[int]], Field(min_length=1)]
    | Annotated[spec.TupleOf[int], Field(min_length=1)],
    WrapValidator(_validate_sharing),
]
LETTERS_RULE = "may hold only G (global), L (local) and letters of model.kinds"
_LAYER_LETTERS = spec.TextRule(r"^[A-Z]{1,10000}$", f"{LETTERS_RULE}; use one such as GLLLLL")
KindLetter = Annotated[
    str, spec.TextRule(r"^[A-FH-KM-Z]$", "is not a free letter; use one of A to Z but G and L")
]
MLPS = {"gelu": False, "swiglu": True, "geglu": True}
"""`model.mlp` -> whether a gate multiplies the values, so that ``up`` has twice the rows."""


class ModelConfig(spec.SpecModel):
    """One transformer of the GPT-2 family. A preset fills what is not written; it is a name, or a
    checkpoint's folder or repository, with a slash.

    ``n_kv_head = n_head`` is multi-head attention, 1 multi-query (arXiv 1911.02150), between
    them grouped-query (arXiv 2305.13245). ``attention_pattern`` holds one letter a layer, G
    for global and L for local, tiled over the depth; a token of a local layer sees ``window``
    tokens, itself included. ``local``, ``global`` and ``kinds`` set what layers of one kind have
    of their own. ``kv_sharing`` is cross-layer attention, trained that way.
    """

    model_config = ConfigDict(serialize_by_alias=True)
    omitted_defaults = frozenset({
        "kv", "rotary_share", "rope_scaling", "qk_norm", "norm_placement", "attention_scale",
        "embedding_scale", "sink", "sink_tokens", "local", "global_", "kinds",
    })  # fmt: skip

    vocab_size: spec.PositiveInt = 50257
    """Tokens in the vocabulary; at least those of data.tokenizer. Unit: tokens. Example: 50304"""
    block_size: spec.PositiveInt = 1024
    """Context length. Unit: tokens. Example: 512"""
    n_layer: Annotated[spec.PositiveInt, Field(le=10_000)] = 12
    """Transformer layers. Unit: layers. Example: 6"""
    n_head: Annotated[spec.PositiveInt, Field(le=10_000)] = 12
    """Query heads a layer. Unit: heads. Example: 4"""
    n_kv_head: spec.PositiveInt = Field(default_factory=lambda fields: fields.get("n_head", 1))
    """K/V heads a layer: n_head is multi-head attention, 1 multi-query, a divisor between them
    grouped-query.
    Unit: heads. Default: n_head. Example: 1"""
    n_embd: Annotated[spec.PositiveInt, Field(le=10**6)] = 768
    """Width of the residual stream. Unit: dimensions. Example: 1536"""
    head_dim: spec.PositiveInt = Field(
        default_factory=lambda fields: max(1, fields.get("n_embd", 1) // fields.get("n_head", 1))
    )
    """Width of a head. Unit: dimensions. Default: n_embd / n_head. Example: 128"""
    mlp: Annotated[str, spec.OneOf(lambda: MLPS)] = "gelu"
    """Activation of the MLP: a GELU in its tanh form (gelu), or a gate beside the values (arXiv
    2002.05202) with a SiLU (swiglu) or a GELU (geglu).
    Example: swiglu"""
    ffn_dim: spec.PositiveInt = Field(default_factory=lambda fields: _default_ffn_dim(**fields))
    """Hidden width of the MLP.
    Unit: dimensions. Default: 4 n_embd; with a gate 8/3 n_embd, rounded up to a multiple of 64.
    Example: 2048"""
    position: Annotated[str, spec.OneOf(lambda: layer_config.POSITIONS)] = "learned"
    """How positions enter: a learned vector for each, rotary embedding (arXiv 2104.09864), or not
    at all.
    Example: rope"""
    rope_theta: spec.PositiveFloat = 10_000.0
    """Base of the rotary frequencies. Unit: none. Example: 500000, position: rope"""
    rotary_share: layer_config.RotaryShare = 1.0
    """The part of a head that rotates, its leading dimensions as in GPT-NeoX (arXiv 2204.06745): 0
    is none.
    Unit: none. Example: 0.25, position: rope"""
    rope_scaling: layer_config.RopeScaling | None = None
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
    attention_scale: spec.PositiveFloat | None = None
    """What attention scores are multiplied by.
    Unit: none. Default: 1 / sqrt(width of a head's keys). Example: 0.0625"""
    embedding_scale: spec.PositiveFloat = 1.0
    """What the embeddings of tokens are multiplied by as they enter the first layer; Gemma 3 has
    sqrt(n_embd).
    Unit: none. Example: 27.7"""
    norm_eps: spec.PositiveFloat = 1e-5
    """Added to the variance before its root is taken. Unit: none. Example: 1e-6"""
    bias: bool = True
    """Biases in linear layers and layer norms. Example: false"""
    tie_embeddings: bool = True
    """The head reuses the token embedding. Example: false"""
    window: spec.PositiveInt | None = None
    """Tokens that a token of a local layer sees, itself included.
    Unit: tokens. Example: 256, attention_pattern: GLLLLL"""
    sink: Literal["none", "learned"] = "none"
    """A learned logit of each query head that joins the denominator of its softmax, as in gpt-oss
    (arXiv 2508.10925), so that a head may attend to nothing. It stores no bytes.
    Example: learned"""
    sink_tokens: spec.NonNegativeInt = 0
    """The first tokens of a text, or of a packed document, that local layers see beside their
    window (StreamingLLM, arXiv 2309.17453), in training and in the cache. They keep their
    positions.
    Unit: tokens. Example: 4, window: 256, attention_pattern: GLLLLL"""
    attention_pattern: Annotated[str, _LAYER_LETTERS] = "G"
    """G (global), L (local), D (gated linear attention) or a letter of `kinds` a layer, tiled over
    depth.
    Example: GLLLLL, window: 256"""
    local: layer_config.LayerKind | None = None
    """Settings of the local layers (L) alone.
    Example: {n_kv_head: 1}, position: rope, window: 256, attention_pattern: GLLLLL"""
    global_: layer_config.LayerKind | None = Field(default=None, alias="global")
    """Settings of the global layers (G) alone; with a window they are local, too.
    Example: {rope_theta: 1e6}, position: rope, window: 256, attention_pattern: GLLLLL"""
    kinds: dict[KindLetter, layer_config.LayerKind] = {}
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
    """What a token stores: K and V (separate), or what both are read from: one tensor (tied,
    rotated_tied, grouped_tied) or latents (a map).
    Example: separate, position: rope"""

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "preset" not in data:
            return data
        name, own = data["preset"], {key: data[key] for key in data if key != "preset"}
        if isinstance(name, str) and "/" in name:
            try:
                return find_checkpoint_tool("shape")(name) | own
            except PretrainedError as error:
                spec.raise_problems([("preset", f"has no model: {error}")])
        if not isinstance(name, str) or name not in PRESETS:
            text = f"is not a preset; {suggest_name(name, PRESETS)}"
            spec.raise_problems([("preset", explain_missing("preset", name) or text)])
        return PRESETS[name] | own

    @property
    def position_scheme(self) -> layer_config.PositionScheme:
        """The entry of ``position`` in `POSITIONS`."""
        return layer_config.POSITIONS[self.position]

    def check_positions(self, length: int, remedy: str) -> None:
        """Raise ValueError if learned positions end before the last of ``length`` tokens."""
        if self.position_scheme.has_embedding and length > self.block_size:
            text = f"{length} tokens exceed block_size = {self.block_size}, the end of the learned"
            raise ValueError(f"{text} positions; {remedy}")

    @property
    def kv_form(self) -> KVForm:
        """How K and V come from what a token stores."""
        return NAMED_FORMS[self.kv] if isinstance(self.kv, str) else self.kv

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
    def layers(self) -> tuple[layer_config.LayerConfig, ...]:
        """What mixes the tokens of every layer."""
        by_kind = {kind: self._resolve_layer(kind) for kind in set(self.layer_kinds)}
        return tuple(map(by_kind.__getitem__, self.layer_kinds))

    @property
    def stored_sizes(self) -> dict[int, str]:
        """The sizes of the vectors that a token stores, and of what they are, over all layers."""
        names = {one.size: one.name for layer in self.layers for one in layer.stored}
        return {size: names[size] for size in sorted(names)}

    @cached_property
    def kind_settings(self) -> dict[str, tuple[str, layer_config.LayerKind]]:
        """The key and the settings of every kind that has a letter."""
        none = layer_config.LayerKind()
        built_in = {"G": ("global", self.global_ or none), "L": ("local", self.local or none)}
        kinds = {
            letter: layer_config.LayerKind(mixer=name)
            for letter, name in list_letters().items()
            if letter in self.attention_pattern
        }
        kinds |= self.kinds
        return built_in | {kind: (f"kinds.{kind}", own) for kind, own in kinds.items()}

    def _resolve_layer(self, kind: str) -> layer_config.LayerConfig:
        form, (_, own) = self.kv_form, self.kind_settings[kind]
        layer = layer_config.LayerConfig(
            kind=kind,
            position=self.position if self.position_scheme.has_embedding else "none",
            n_head=self.n_head,
            n_kv_head=own.n_kv_head or self.n_kv_head,
            head_dim=own.head_dim or self.head_dim,
            window=None,
            rotary_dim=0,
            rope_theta=own.rope_theta or self.rope_theta,
            kv_form=form,
            mixer=find_mixer(own.mixer or "attention"),
        )
        if layer.mixer is not ATTENTION:
            return layer
        position = own.position or self.position
        share = self.rotary_share if own.rotary_share is None else own.rotary_share
        scheme = layer_config.POSITIONS[position]
        is_none = scheme.is_rotary and not round(share * layer.head_dim)
        rotary_dim = form.rotated_dims(layer.head_dim, share if scheme.is_rotary else 0.0)
        window = own.window or (self.window if kind == "L" else None)
        return replace(
            layer,
            position="none" if is_none else position,
            n_kv_head=form.count_heads(layer.n_kv_head),
            window=window,
            rotary_dim=rotary_dim,
            has_sink=self.sink == "learned",
            sink_tokens=0 if window is None else self.sink_tokens,
            rope_scaling=(own.rope_scaling or self.rope_scaling) if rotary_dim else None,
            has_qk_norm=self.qk_norm,
            attention_scale=self.attention_scale,
        )

    def _find_problems(self) -> spec.Problems:
        if problems := [*self._find_letter_problems()]:  # what its layers are is not known
            yield from problems
            return
        counts: dict[str, int | None] = {"n_kv_head": self.n_kv_head}
        counts |= {f"{key}.n_kv_head": own.n_kv_head for key, own in self.kind_settings.values()}
        for key, count in counts.items():
            if count is not None and self.n_head % count:
                yield key, self.describe_divisors()
        if "head_dim" not in self.model_fields_set and self.n_embd % self.n_head:
            text = f"is not a multiple of n_head = {self.n_head}"
            yield "n_embd", f"{text}; change one, or set head_dim"
        yield from self._find_mixer_problems()
        yield from self._find_position_problems()
        if self.sink_tokens and all(layer.window is None for layer in self.layers):
            text = "stay visible beside a window, and no layer has one"
            yield "sink_tokens", f"{text}; set window and attention_pattern, or leave it out"
        kinds, (_, local) = self.layer_kinds, self.kind_settings["L"]
        if self.window is None and local.window is None and "L" in kinds:
            text = "has local layers (L) but no window"
            yield "attention_pattern", f"{text}; set model.window to the tokens that they see"
        if self.window is not None and "L" not in kinds:
            pattern = re.sub("^G+$", "GLLLLL", self.attention_pattern)
            text = f"needs local layers, and attention_pattern {self.attention_pattern} gives none"
            yield "window", f"{text} on {self.n_layer} layers; use one such as {pattern}"
        if self.qk_norm and not self.kv_form.stores_keys:
            text = "normalizes what is stored, which is V, too, under this kv"
            yield "qk_norm", f"{text}; use kv: separate, or leave it out"
        yield from self.kv_form.find_problems(self)
        try:
            message = self.describe_shared_state(self.kv_owners)
        except SharingError as error:
            message = str(error)
        if message:
            yield "kv_sharing", message

    def describe_shared_state(self, owners: Sequence[int]) -> str | None:
        """Return why layers cannot read what ``owners`` store, if one of these has a state."""
        for layer, owner in enumerate(owners):
            if owner != layer and not self.layers[layer].stores_tokens:
                text = f"joins layers {owner} and {layer}, whose states are not for others to read"
                return f"{text}; use none, or groups of layers of attention"
        return None

    def _find_mixer_problems(self) -> spec.Problems:
        """Yield settings of kinds that their mixer does not read, and mixers that are guesses."""
        letters = list_letters()
        for kind, (key, own) in self.kind_settings.items():
            if own.mixer is None:
                if kind in letters:
                    text = f"is missing: {kind} without settings is {letters[kind]}"
                    yield f"{key}.mixer", f"{text}; write mixer: {letters[kind]} or attention"
                continue
            name = own.mixer if isinstance(own.mixer, str) else own.mixer.name
            if kind in KIND_NAMES and name != "attention":
                text = f"cannot change what {kind} is; use kinds: {{M: {{mixer: {name}}}}}"
                yield f"{key}.mixer", text
            read = {"mixer", *find_mixer(own.mixer).settings}
            for field in type(own).model_fields:
                if field not in read and getattr(own, field) is not None:
                    yield f"{key}.{field}", f"is not read by mixer {name}; leave it out"

    def _find_letter_problems(self) -> spec.Problems:
        """Yield letters without a kind, and settings of kinds without a layer."""
        for letter in dict.fromkeys(self.attention_pattern):
            if letter not in self.kind_settings:
                text = f"define {letter}, as in kinds: {{{letter}: {{position: none}}}}"
                missing = explain_missing("attention_pattern", letter)
                yield "attention_pattern", missing or f"{LETTERS_RULE}; {text}"
        for kind, (key, own) in self.kind_settings.items():
            is_set = bool(own.model_fields_set) or kind not in KIND_NAMES
            if is_set and kind not in self.attention_pattern:
                fields = (n for n in type(own).model_fields if n in own.model_fields_set)
                field = ".".join([key, *islice(fields, 1)])
                text = f"is of layers {kind}, and attention_pattern {self.attention_pattern}"
                yield field, f"{text} has none; use one such as G{kind}, or leave it out"

    def describe_divisors(self) -> str:
        """Return which numbers of K/V heads, or of groups of heads, there may be."""
        divisors = [n for n in range(1, min(self.n_head, 4096) + 1) if self.n_head % n == 0]
        return f"does not divide n_head = {self.n_head}; use {spec.join_or(divisors)}"

    def _find_position_problems(self) -> spec.Problems:
        for key, own in self.kind_settings.values():
            if own.position is None:
                continue
            if layer_config.POSITIONS[own.position].has_embedding:
                text = "adds vectors to the tokens; write it as model.position"
                yield f"{key}.position", text
            elif self.position_scheme.has_embedding:
                text = f"is set beside model.position = {self.position}, which every layer sees in"
                yield f"{key}.position", f"{text} the tokens; use rope or none there"
        problems = (
            self._find_rotation_problems(layer) for layer in set(self.layers) if layer.stores_tokens
        )
        yield from sorted(set(chain.from_iterable(problems)))

    def _find_rotation_problems(self, layer: layer_config.LayerConfig) -> spec.Problems:
        """Yield why yarn has no waves to scale, or what is to rotate is no pairs of dimensions."""
        key, own = self.kind_settings[layer.kind]

        def place(name: str) -> str:
            return name if getattr(own, name) is None else f"{key}.{name}"

        if layer.rope_scaling and layer.rope_scaling.by == "yarn" and layer.rope_theta <= 1:
            text = "is not above 1, so no wave is longer than another for yarn to scale"
            yield place("rope_theta"), text
        position = own.position or self.position
        share = self.rotary_share if own.rotary_share is None else own.rotary_share
        rotated = share * layer.head_dim
        if not layer_config.POSITIONS[position].is_rotary or not share:
            return
        form, count = layer.kv_form, layer.rotary_dim
        if form.source and count != round(rotated):  # a user's form says what rotates
            if count % 2 or count > layer.key_dim:
                text = f"rotates {count} of {layer.key_dim} dimensions of a head, and pairs rotate"
                yield "kv", f"{text}; return another number from rotated_dims"
            elif share < 1 and form.rotated_dims(layer.head_dim, 1.0) == count:
                text = f"changes nothing under kv: {form}, which rotates {count} dimensions"
                yield place("rotary_share"), f"{text}; leave it out"
        elif share == 1 and layer.head_dim % 2:
            is_derived = own.head_dim is None and "head_dim" not in self.model_fields_set
            text = f"is odd{' (n_embd / n_head)' if is_derived else ''}: {layer.head_dim}"
            yield place("head_dim"), f"{text}; {position} rotates pairs, so use an even head_dim"
        elif share < 1 and (abs(rotated - layer.rotary_dim) >= 1e-6 or layer.rotary_dim % 2):
            nearest = 2 * max(1, round(rotated / 2))
            hint = f"use {nearest} / {layer.head_dim} = {nearest / layer.head_dim:.6g}"
            text = f"gives {rotated:.6g} of head_dim = {layer.head_dim}, and pairs rotate; {hint}"
            yield place("rotary_share"), text

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
        windows = [
            layer.window if layer.visible_tokens(self.block_size) < self.block_size else None
            for layer in layers
        ]
        thetas = [layer.rope_theta if layer.rotary_dim else None for layer in layers]
        shares = [layer.rotary_share or None for layer in layers]
        facts |= {
            "n_kv_head": _collapse([layer.n_kv_head for layer in layers]),
            "head_dim": _collapse([layer.head_dim for layer in layers]),
            "position": _collapse([layer.position for layer in layers]),
            "window": _collapse(windows),
            "owners": list(self.kv_owners),
            "kinds": "".join(
                layer.mixer.letter or ("G" if window is None else "L")
                for layer, window in zip(layers, windows, strict=True)
            ),
        }
        del facts["rope_theta"]
        facts.pop("rope_scaling", None)
        scalings = [  # "" of a layer that rotates as it is, beside others that are scaled
            (one.rope_scaling.model_dump_json() if one.rope_scaling else "")
            if one.rotary_dim
            else None
            for one in layers
        ]
        if any(scalings):
            facts["rope_scaling"] = _collapse(scalings)
        if any(thetas):
            facts["rope_theta"] = _collapse(thetas)
        if any(shares) and _collapse(shares) != 1:
            facts["rotary_share"] = _collapse(shares)
        if not any(windows):
            facts.pop("sink_tokens", None)
        if (source := self.kv_form.source) is not None:
            facts["kv_code"] = source.digest
        if any(one.mixer.source for one in layers):
            facts["mixers"] = [one.mixer.source and one.mixer.describe() for one in layers]
        return facts


def _collapse(values: list[Any]) -> Any:
    """Return the one value that layers have, leaving out those for which it is None; else all."""
    different = {value for value in values if value is not None}
    if len(different) > 1:
        return values
    return next(iter(different), None)


def _default_ffn_dim(mlp: str = "gelu", n_embd: int = 1, **_others: Any) -> int:
    return -(-8 * n_embd // (3 * 64)) * 64 if MLPS.get(mlp) else 4 * n_embd
