"""`serving` of an experiment: what changes only inference."""

from typing import Annotated, Literal

from pydantic import Field

from kvlab.own_extensions import extend, find_members
from kvlab.sharing import owner_map, tied_slots
from kvlab.spec.dtypes import MIN_GROUP, ROTATIONS, KVDtypeField, KVStorage
from kvlab.spec.model_config import ModelConfig, SharingField
from kvlab.spec.spec_model import OneOf, PositiveInt, Problems, SpecModel


@extend("serving")
class ServingConfig(SpecModel):
    """`serving`: what changes only inference. It never retrains.

    ``tie`` joins layers on one cache slot though each was trained with its own K/V. With
    ``tie_rule: overwrite`` every layer writes the shared slot and the last one wins, as in the
    code of the Character.AI article; with ``owner`` only the first layer of a group writes.
    """

    omitted_defaults = frozenset({"kv_group", "kv_rotate", "compile"})

    kv_dtype: KVDtypeField = "model"
    """How K/V are stored; model keeps the model's dtype. As {k: int8, v: int4} each has its own.
    Example: int8"""
    kv_group: Annotated[PositiveInt, Field(ge=MIN_GROUP)] | None = None
    """Numbers of a head that share a scale, in a kv_dtype with scales. It divides head_dim. Where
    keys are in blocks of tokens, it is also the tokens of a block.
    Unit: numbers. Default: 32 (at most head_dim) for codes of 4 or 2 bits, and the whole head for
    int8 and fp8. Example: 16, kv_dtype: int4"""
    kv_rotate: Annotated[str, OneOf(lambda: ["none", *ROTATIONS])] = "none"
    """Multiply K and V by an orthonormal matrix of the head before they are stored, so that few
    numbers of a vector are much larger than the others. Scores and values stay the same but for
    rounding, and so do bytes.
    Example: none, kv_dtype: int4"""
    tie: SharingField = "none"
    """Layers that share one cache slot at serving, though each was trained with its own K/V.
    Patterns as in model.kv_sharing.
    Example: 'adjacent:2'"""
    tie_rule: Literal["overwrite", "owner"] = "overwrite"
    """Who writes a tied slot: every layer, so that the last one wins (overwrite), or its first
    layer alone (owner).
    Example: owner, tie: 'adjacent:2'"""
    compile: bool = False
    """torch.compile the step that decodes one token, on CUDA before it is captured. Results differ
    in rounding. Each size of batch and cache is compiled anew: for small models in about 20 s on
    one core.
    Example: true"""

    def _find_problems(self) -> Problems:
        yield from self.kv.find_setting_problems()
        if self.compile and not self.kv.has_fixed_steps:
            text = f"needs steps of fixed shapes, which kv_dtype {self.kv_dtype} does not have"
            yield "compile", f"{text}; leave one of the two out"

    @property
    def kv(self) -> KVStorage:
        """How the cache stores K and V."""
        return KVStorage.of(self)

    def find_slots(self, model: ModelConfig) -> tuple[int, ...]:
        """Return for every layer of ``model`` the slot that it reads.

        Raises:
            SharingError: the tie is not possible on these layers.
        """
        tie = owner_map(self.tie, model.layer_kinds)
        return tied_slots(model.kv_owners, tie, self.tie_rule)

    def store_as_model(self, model: ModelConfig) -> "ServingConfig":
        """Return the same serving with K and V in the model's dtype, and as many tokens kept."""
        fields = type(self).model_fields
        update = {name: field.default for name, field in fields.items() if name.startswith("kv_")}
        for fix in find_members("fixed_budgets").values():
            update |= fix(model, self)
        return self.model_copy(update=update)
