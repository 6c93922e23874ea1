"""`serving` of an experiment: what changes only inference."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvlab.spec.dtypes import DTYPES, MIN_GROUP, list_kv_dtypes
from kvlab.spec.model_config import SharingField
from kvlab.spec.spec_model import FieldMessage, OneOf, PositiveInt, SpecModel, raise_problems


class ServingConfig(SpecModel):
    """`serving`: what changes only inference. It never retrains.

    ``tie`` joins layers on one cache slot though each was trained with its own K/V. With
    ``tie_rule: overwrite`` every layer writes the shared slot and the last one wins, as in the
    code of the Character.AI article; with ``owner`` only the first layer of a group writes.
    """

    omitted_defaults: ClassVar[dict[str, Any]] = {"kv_group": None}

    kv_dtype: Annotated[str, OneOf(list_kv_dtypes)] = Field(
        default="model",
        description="How K/V are stored; model keeps the model's dtype.",
        examples=["int8"],
    )
    kv_group: Annotated[PositiveInt, Field(ge=MIN_GROUP)] | None = Field(
        default=None,
        description="Numbers of a head that share a scale, in a kv_dtype with scales. It divides"
        " head_dim.",
        examples=[16],
        json_schema_extra={
            "unit": "numbers",
            "computed_default": "32 for int4, and the whole head for int8 and fp8",
            "given": {"kv_dtype": "int4"},
        },
    )
    tie: SharingField = Field(
        default="none",
        description="Layers that share one cache slot at serving, though each was"
        " trained with its own K/V. Patterns as in model.kv_sharing.",
        examples=["adjacent:2"],
    )
    tie_rule: Literal["overwrite", "owner"] = Field(
        default="overwrite",
        description="Who writes a tied slot: every layer, so that the last one wins"
        " (overwrite), or its first layer alone (owner).",
        examples=["owner"],
        json_schema_extra={"given": {"tie": "adjacent:2"}},
    )

    @model_validator(mode="after")
    def _check(self) -> "ServingConfig":
        raise_problems(self._find_problems())
        return self

    def _find_problems(self) -> Iterator[FieldMessage]:
        if self.kv_group is not None and not self._has_scales:
            names = [name for name, dtype in DTYPES.items() if dtype.is_quantized]
            text = f"has no scales to group in kv_dtype {self.kv_dtype}"
            yield "kv_group", f"{text}; leave it out, or use {', '.join(names[:-1])} or {names[-1]}"

    @property
    def _has_scales(self) -> bool:
        return self.kv_dtype in DTYPES and DTYPES[self.kv_dtype].is_quantized

    def find_storage_problems(self, sizes: Iterable[int]) -> Iterator[FieldMessage]:
        """Yield why heads of ``sizes`` numbers cannot be stored, by fields of a spec."""
        if not self._has_scales:
            return
        dtype = DTYPES[self.kv_dtype]
        problem = next(
            filter(None, (dtype.find_size_problem(n, self.kv_group) for n in sizes)), None
        )
        if problem is not None:
            yield f"serving.{'kv_dtype' if self.kv_group is None else 'kv_group'}", problem

    def store_as_model(self) -> "ServingConfig":
        """Return the same serving with K and V in the model's dtype."""
        return self.model_copy(update={"kv_dtype": "model", "kv_group": None})
