"""`model.local`, `model.global` and `model.kinds`: settings by kind of layer, and what they give.

`ModelConfig.layers` has one `LayerConfig` a layer, resolved from `model` once for all who ask. The
byte arithmetic, the FLOPs, the cache and the model read it. Also the table of position schemes.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from kvlab.spec import spec_model as spec
from kvlab.spec.kv_forms import KVForm, StoredVectors
from kvlab.spec.mixers import ATTENTION, Mixer, MixerField


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

RotaryShare = Annotated[float, Field(ge=0.0, le=1.0)]


class RopeScaling(spec.SpecModel):
    """`model.rope_scaling`: rotary frequencies for a longer context than they were trained on.

    ``linear`` divides all frequencies by ``factor`` (arXiv 2306.15595). ``yarn`` divides those of
    long waves, keeps those of short ones, and takes a mean between them (YaRN, arXiv 2309.00071);
    it also multiplies queries and keys by 0.1 ln(factor) + 1.
    """

    by: Literal["linear", "yarn"]
    """Which frequencies are divided: all, or those of long waves.
    Example: yarn, factor: 4, original: 256"""
    factor: Annotated[float, Field(ge=1.0)]
    """By how much the context is longer. Unit: none. Example: 8"""
    original: spec.PositiveInt | None = None
    """Context length before; yarn needs it. Unit: tokens. Example: 4096, by: yarn, factor: 4"""
    beta_fast: spec.PositiveFloat = 32.0
    """yarn keeps frequencies that turn at least this often in `original` tokens.
    Unit: turns. Example: 16, by: yarn, factor: 4, original: 256"""
    beta_slow: spec.PositiveFloat = 1.0
    """yarn divides frequencies that turn at most this often in `original` tokens.
    Unit: turns. Example: 2, by: yarn, factor: 4, original: 256"""
    truncate: bool = True
    """yarn rounds the two limits to whole pairs of dimensions, outwards.
    Example: false, by: yarn, factor: 4, original: 256"""

    def _find_problems(self) -> spec.Problems:
        if self.by == "yarn":
            if self.original is None:
                yield "original", "is missing; yarn counts turns in the original context length"
            if self.beta_fast <= self.beta_slow:
                text = f"is not above beta_slow = {self.beta_slow:g}"
                yield "beta_fast", f"{text}; use more, such as {32 * self.beta_slow:g}"
            return
        for name in ("original", "beta_fast", "beta_slow", "truncate"):
            if getattr(self, name) != type(self).model_fields[name].default:
                yield name, "is read only by: yarn; leave it out"


class LayerKind(spec.SpecModel):
    """Settings of one kind of layer. What is left out is as in `model`."""

    n_kv_head: spec.PositiveInt | None = None
    """K/V heads of these layers. Unit: heads. Default: `model.n_kv_head`. Example: 1"""
    head_dim: spec.PositiveInt | None = None
    """Width of a head of these layers. Unit: dimensions. Default: `model.head_dim`. Example: 128"""
    position: Annotated[str, spec.OneOf(lambda: POSITIONS)] | None = None
    """How positions enter these layers. A scheme that adds vectors to the tokens is a setting of
    `model` alone.
    Default: `model.position`. Example: none"""
    rope_theta: spec.PositiveFloat | None = None
    """Base of the rotary frequencies of these layers.
    Unit: none. Default: `model.rope_theta`. Example: 1e6"""
    rotary_share: RotaryShare | None = None
    """The part of a head that rotates in these layers.
    Unit: none. Default: `model.rotary_share`. Example: 0.5"""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies of these layers.
    Default: `model.rope_scaling`. Example: {by: linear, factor: 8}"""
    window: spec.PositiveInt | None = None
    """Tokens that a token of these layers sees, itself included.
    Unit: tokens. Default: `model.window` in `local`; elsewhere all before it. Example: 128"""
    mixer: MixerField | None = None
    """How these layers mix their tokens; a setting of `kinds` alone.
    Default: attention. Example: attention"""


@dataclass(frozen=True)
class LayerConfig:
    """What mixes the tokens of one layer.

    Attributes:
        kind: its letter in ``attention_pattern``. Layers of one kind are equal.
        position: its scheme in `POSITIONS`; ``none`` also where no dimension rotates.
        n_kv_head: K/V heads; of latent attention its groups.
        head_dim: numbers of one head of V, and of Q and K without what they have beside V.
        window: tokens that a token sees, itself included; None for all before it.
        rotary_dim: the leading dimensions of a head of Q and K that are rotated; 0 for none.
        kv_form: how K and V come from what is stored.
        has_sink: a learned logit of each query head joins the denominator of its softmax.
        sink_tokens: the first tokens, which are seen beside the window; 0 without a window.
        has_qk_norm: queries and keys have an RMS norm each, before they are rotated.
        attention_scale: what scores are multiplied by; None for ``key_dim ** -0.5``.
        mixer: attention, or what stands in its place. Then no setting of attention has a meaning.
    """

    kind: str
    position: str
    n_head: int
    n_kv_head: int
    head_dim: int
    window: int | None
    rotary_dim: int
    rope_theta: float
    kv_form: KVForm
    has_sink: bool = False
    sink_tokens: int = 0
    rope_scaling: RopeScaling | None = None
    has_qk_norm: bool = False
    attention_scale: float | None = None
    mixer: Mixer = ATTENTION

    @property
    def stores_tokens(self) -> bool:
        """Whether each token stores something of its own, and so may be read by itself."""
        return bool(self.stored)

    @property
    def rotation(self) -> tuple[int, float, RopeScaling | None]:
        """What determines the rotary table of the layer: rotated dimensions, their base and the
        scaling of their frequencies."""
        return self.rotary_dim, self.rope_theta, self.rope_scaling

    @property
    def rotary_share(self) -> float:
        """The part of a head, or of the key that all heads share, that is rotated."""
        if self.kv_form.shares_rotary_key:
            return float(self.rotary_dim > 0)
        return self.rotary_dim / self.head_dim

    @property
    def q_width(self) -> int:
        """Numbers of all query heads of a token."""
        return self.n_head * self.key_dim

    @property
    def query_dim(self) -> int:
        """Numbers of the vector that queries are mapped from; 0 if they are projected directly."""
        return self.kv_form.query_dim()

    @property
    def q_rows(self) -> int:
        """Rows of the layer's first projection that queries come from."""
        return self.query_dim or self.q_width

    @property
    def out_width(self) -> int:
        """Numbers that all query heads of a token take from what they attend to."""
        return self.n_head * self.head_dim

    @property
    def key_dim(self) -> int:
        """Numbers of one head of Q and K."""
        return self.kv_form.key_dim(self)

    @property
    def stored(self) -> tuple[StoredVectors, ...]:
        """What one token stores in the layer's cache slot.

        Raises:
            MemberError: a form of a user's file returns what no cache can hold.
        """
        return self.mixer.stored(self)

    @property
    def store_width(self) -> int:
        """Numbers that one token stores, as the layer's projections give them."""
        return sum(part.count * part.size for part in self.stored)

    def visible_tokens(self, tokens: int) -> int:
        """Return how many of ``tokens`` the last one sees; its slot holds as many."""
        return tokens if self.window is None else min(tokens, self.sink_tokens + self.window)
