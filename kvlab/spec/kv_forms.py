"""`model.kv`: what a token stores, and what that means for heads, weights and FLOPs.

A `KVForm` is one way to have K and V. It is arithmetic without torch; `view` names the module that
computes K and V from what is stored. Specs, layouts, FLOPs and the model ask it, and none of them
knows a form by its name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import WrapValidator

from kvlab.spec import spec_model as spec
from kvlab.spec.members import DUMP_OFFERED, Member, accept_offered, find_offered

if TYPE_CHECKING:
    from kvlab.spec.layer_config import LayerConfig
    from kvlab.spec.model_config import ModelConfig


@dataclass(frozen=True)
class StoredVectors:
    """One part of what a token stores in a layer: ``count`` vectors of ``size`` numbers."""

    count: int
    size: int
    name: str = "head"


class KVForm(Member, ABC):
    """How K and V come from what a token stores.

    Attributes:
        name: as in ``model.kv``.
        view: the torch module that reads K and V, a `kvlab.model.attention.SeparateKV`, as
            ``module:class``; or the name of a class beside the form's.
        parts: the names of the parts of `stored`, which seed their rows of ``qkv``.
        stores_keys: whether K and V are stored as they are attended to.
        shares_rotary_key: whether one rotary key serves all heads, beside what is theirs.
    """

    view: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    stores_keys: ClassVar[bool] = False
    shares_rotary_key: ClassVar[bool] = False

    @abstractmethod
    def stored(self, layer: "LayerConfig") -> tuple[StoredVectors, ...]:
        """Return what one token stores in a layer's cache slot."""

    def count_heads(self, n_kv_head: int) -> int:
        """Return the K/V heads, or vectors in their place, of a layer with ``n_kv_head``."""
        return n_kv_head

    def rotated_dims(self, head_dim: int, share: float) -> int:
        """Return how many dimensions are rotated if positions rotate ``share`` of a head."""
        return round(share * head_dim)

    def key_dim(self, layer: "LayerConfig") -> int:
        """Return the numbers of one head of Q and K."""
        return layer.head_dim

    def query_dim(self) -> int:
        """Return the numbers of the vector that queries are mapped from; 0 for none."""
        return 0

    def up_weights(self, layer: "LayerConfig") -> int:  # noqa: ARG002
        """Return the weights that map what is stored to K and V, and vectors to queries."""
        return 0

    def norm_weights(self) -> int:
        """Return the weights of norms of what is stored."""
        return 0

    def flops_per_key(self, layer: "LayerConfig") -> int:
        """Return the FLOPs of a decoded token in one layer for each key that it attends to."""
        return 4 * layer.out_width

    def find_problems(self, model: "ModelConfig") -> spec.Problems:  # noqa: ARG002
        """Yield what of ``model`` does not go with it, by fields."""
        return iter(())

    def rescale(self, head_dim: int, new_head_dim: int) -> Self | None:  # noqa: ARG002
        """Return the form for heads of another width; None if it does not scale to it."""
        return self


@dataclass(frozen=True)
class SeparateForm(KVForm):
    """K and V are stored."""

    name = "separate"
    view = "kvlab.model.attention:SeparateKV"
    parts = ("k", "v")
    stores_keys = True

    def stored(self, layer: "LayerConfig") -> tuple[StoredVectors, ...]:
        heads = StoredVectors(layer.n_kv_head, layer.head_dim)
        return heads, heads


@dataclass(frozen=True)
class TiedForm(KVForm):
    """One tensor is V and, rotated when it is read, K."""

    name = "tied"
    view = "kvlab.model.attention:TiedKV"
    parts = ("v",)

    def stored(self, layer: "LayerConfig") -> tuple[StoredVectors, ...]:
        return (StoredVectors(layer.n_kv_head, layer.head_dim),)

    def flops_per_key(self, layer: "LayerConfig") -> int:
        return super().flops_per_key(layer) + 3 * layer.n_kv_head * layer.rotary_dim


@dataclass(frozen=True)
class RotatedTiedForm(KVForm):
    """One tensor is K and V, stored with the rotation of its position, which the output is freed of
    by that of the query. So values turn with their distance (DeepSeek-V4)."""

    name = "rotated_tied"
    view = "kvlab.model.attention:RotatedTiedKV"
    parts = ("v",)

    def stored(self, layer: "LayerConfig") -> tuple[StoredVectors, ...]:
        return (StoredVectors(layer.n_kv_head, layer.head_dim),)

    def find_problems(self, model: "ModelConfig") -> spec.Problems:
        if not model.position_scheme.is_rotary:
            yield "kv", f"needs position: rope, not {model.position}; use tied instead"


def _find_rotary_key_problems(
    model: "ModelConfig", fixed: tuple[str, ...] = ("position", "rotary_share")
) -> spec.Problems:
    """Yield settings of heads that have no meaning where all heads share a rotary key."""
    if model.rotary_share != 1:
        yield "rotary_share", "has no meaning beside this kv, whose shared key rotates; drop it"
    for key, own in model.kind_settings.values():
        for name in fixed:
            if getattr(own, name) is not None:
                yield f"{key}.{name}", "is the same in all layers under this kv; leave it out"


@dataclass(frozen=True)
class GroupedTiedForm(KVForm):
    """One tensor is V, and its first half is half of K; a rotary key for all heads is the other
    half (GTA, arXiv 2505.21487)."""

    name = "grouped_tied"
    view = "kvlab.model.attention:GroupedTiedKV"
    parts = ("v", "rotary_key")
    shares_rotary_key = True

    def stored(self, layer: "LayerConfig") -> tuple[StoredVectors, ...]:
        heads = StoredVectors(layer.n_kv_head, layer.head_dim)
        return heads, StoredVectors(1, layer.rotary_dim, "rotary key")

    def rotated_dims(self, head_dim: int, share: float) -> int:  # noqa: ARG002
        return head_dim // 2

    def find_problems(self, model: "ModelConfig") -> spec.Problems:
        yield from _find_rotary_key_problems(model)
        if not model.position_scheme.is_rotary:
            yield "kv", f"needs position: rope, not {model.position}; use tied instead"
        for head_dim in sorted({layer.head_dim for layer in model.layers if layer.head_dim % 4}):
            text = f"needs a head_dim that is a multiple of 4, not {head_dim}"
            yield "kv", f"{text}: half of it is rotated in pairs"


class LatentKV(spec.SpecModel, KVForm):
    """`model.kv` as a map: multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434).

    A token stores one latent vector, after an RMS norm of its own, and one rotary key that all
    heads share. Every head's K and V are linear maps of the latent. With ``groups`` above 1 it is
    grouped latent attention (GLA, arXiv 2505.21487): each group of heads has a latent.
    """

    name: ClassVar[str] = "latent"
    view: ClassVar[str] = "kvlab.model.attention:LatentKV"
    parts: ClassVar[tuple[str, ...]] = ("latent", "rotary_key")
    shares_rotary_key: ClassVar[bool] = True

    latent: spec.PositiveInt
    """Numbers of a latent vector. Unit: numbers. Example: 64, rotary: 16"""
    rotary: spec.NonNegativeInt = 0
    """Numbers of the rotary key that all heads share; above 0 if and only if position is rope.
    Unit: numbers. Example: 16, latent: 64"""
    groups: spec.PositiveInt = 1
    """Latent vectors a token, each for n_head / groups of the heads.
    Unit: vectors. Example: 2, latent: 64, rotary: 16"""
    query: spec.PositiveInt | None = None
    """Numbers of the vector that a token's queries are mapped from, after an RMS norm of its own.
    It is not stored; it saves weights.
    Unit: numbers. Default: queries are projected directly. Example: 96, latent: 64, rotary: 16"""

    def stored(self, layer: "LayerConfig") -> tuple[StoredVectors, ...]:
        latents = StoredVectors(layer.n_kv_head, self.latent, "latent")
        rotary = (StoredVectors(1, self.rotary, "rotary key"),) if self.rotary else ()
        return latents, *rotary

    def count_heads(self, n_kv_head: int) -> int:  # noqa: ARG002
        return self.groups

    def rotated_dims(self, head_dim: int, share: float) -> int:  # noqa: ARG002
        return self.rotary

    def key_dim(self, layer: "LayerConfig") -> int:
        return layer.head_dim + self.rotary

    def query_dim(self) -> int:
        return self.query or 0

    def up_weights(self, layer: "LayerConfig") -> int:
        return 2 * layer.out_width * self.latent + self.query_dim() * layer.q_width

    def norm_weights(self) -> int:
        return self.latent

    def flops_per_key(self, layer: "LayerConfig") -> int:
        """Return the FLOPs of attending to the latents themselves."""
        return 2 * layer.n_head * (2 * self.latent + self.rotary)

    def find_problems(self, model: "ModelConfig") -> spec.Problems:
        yield from _find_rotary_key_problems(model, ("position", "rotary_share", "n_kv_head"))
        if model.n_kv_head != model.n_head:
            text = f"has no meaning beside kv.latent, so it must be n_head = {model.n_head}"
            yield "n_kv_head", f"{text}; use kv.groups, or leave it out"
        if model.n_head % self.groups:
            yield "kv.groups", model.describe_divisors()
        is_rotary, position = model.position_scheme.is_rotary, model.position
        if is_rotary and (self.rotary == 0 or self.rotary % 2):
            text = f"is not an even number above 0; {position} rotates pairs of this key alone"
            yield "kv.rotary", f"{text}, so use one such as {2 * -(-model.head_dim // 4)}"
        if not is_rotary and self.rotary:
            yield "kv.rotary", f"needs position: rope, not {position}; leave it out"

    def rescale(self, head_dim: int, new_head_dim: int) -> Self | None:
        scaled = {}
        for name in ("latent", "rotary", "query"):
            size = (getattr(self, name) or 0) * new_head_dim
            if size % head_dim:
                return None
            if size:
                scaled[name] = size // head_dim
        return type(self).model_validate({**scaled, "groups": self.groups})


NAMED_FORMS: dict[str, KVForm] = {
    form.name: form for form in (SeparateForm(), TiedForm(), RotatedTiedForm(), GroupedTiedForm())
}
"""The forms without settings of their own, by their name in ``model.kv``."""


def _validate_kv(value: Any, handler: Callable[[Any], Any]) -> Any:
    """Validate a mapping as latent attention: an error is about one of its keys."""
    is_latent = isinstance(value, dict | LatentKV)
    return LatentKV.model_validate(value) if is_latent else handler(value)


KVField = Annotated[
    Annotated[str, spec.OneOf(lambda: [*NAMED_FORMS, *find_offered(KVForm)])] | LatentKV,
    WrapValidator(_validate_kv),
    accept_offered(KVForm),
    DUMP_OFFERED,
]
