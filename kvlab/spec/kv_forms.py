"""`model.kv`: what a token stores, and what that means for heads, weights and FLOPs.

A `KVForm` is one way to have K and V. It is arithmetic without torch; `view` names the module that
computes K and V from what is stored. Specs, layouts, FLOPs and the model ask it, and none of them
knows a form by its name.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, ClassVar, Union

from pydantic import WrapValidator

from kvlab.own_extensions import find_members
from kvlab.spec import members
from kvlab.spec import spec_model as spec

if TYPE_CHECKING:
    from kvlab.spec.layer_config import LayerConfig
    from kvlab.spec.model_config import ModelConfig


@dataclass(frozen=True)
class StoredVectors:
    """One part of what a token stores in a layer: ``count`` vectors of ``size`` numbers."""

    count: int
    size: int
    name: str = "head"


def _are_stored(form: "KVForm", stored: object) -> bool:
    """Return whether a cache can hold what `KVForm.stored` has returned."""
    return (
        isinstance(stored, tuple)
        and len(stored) == len(form.parts)
        and all(isinstance(one, StoredVectors) for one in stored)
        and all(members.is_count(number, 1) for one in stored for number in (one.count, one.size))
    )


class KVForm(members.Member, ABC):
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
    returns = {
        "stored": (
            _are_stored,
            "a tuple of one StoredVectors, of whole numbers above 0, for each of parts",
        ),
        "find_problems": members.PROBLEMS,
        **dict.fromkeys(("count_heads", "rotated_dims", "key_dim", "query_dim"), members.WHOLE),
        **dict.fromkeys(("up_weights", "norm_weights", "flops_per_key"), members.WHOLE),
    }

    def find_definition_problem(self, module: ModuleType, _text: str) -> str | None:
        parts = getattr(self, "parts", None)
        if not isinstance(parts, tuple) or not parts:
            return f"has parts = {parts!r}; name what a token stores, such as ('k', 'v')"
        if len({"q", *map(str, parts)}) <= len(parts):  # their initial weights are drawn by name
            return f"has parts = {parts!r}; give each a name of its own, other than q"
        return self.find_place_problem(module, "view")

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


def find_rotary_key_problems(
    model: "ModelConfig", fixed: tuple[str, ...] = ("position", "rotary_share")
) -> spec.Problems:
    """Yield settings of heads that have no meaning where all heads share a rotary key."""
    if model.rotary_share != 1:
        yield "rotary_share", "has no meaning beside this kv, whose shared key rotates; drop it"
    for key, own in model.kind_settings.values():
        for name in fixed:
            if getattr(own, name) is not None:
                yield f"{key}.{name}", "is the same in all layers under this kv; leave it out"


NAMED_FORMS: dict[str, KVForm] = {"separate": SeparateForm(), **find_members("kv_forms")}
"""The forms without settings of their own, by their name in ``model.kv``."""

MAPPED_FORMS: tuple[type[spec.SpecModel], ...] = tuple(find_members("mapped_kv_forms").values())
"""The forms whose settings are a map in ``model.kv``; each is a `KVForm`, too."""


if TYPE_CHECKING:
    _Form = str | KVForm
else:
    _Name = Annotated[str, spec.OneOf(lambda: [*NAMED_FORMS, *members.find_offered(KVForm)])]
    _Form = Union[(_Name, *MAPPED_FORMS)]

KVField = Annotated[
    _Form,
    WrapValidator(partial(spec.choose_form, MAPPED_FORMS)),
    members.accept_offered(KVForm),
    members.DUMP_OFFERED,
]
