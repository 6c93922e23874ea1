"""`serving` of an experiment: what changes only inference."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvlab.spec.dtypes import DTYPES, MIN_GROUP, BlockRule, list_kv_dtypes
from kvlab.spec.model_config import ModelConfig, SharingField
from kvlab.spec.spec_model import (
    FieldMessage,
    NonNegativeInt,
    OneOf,
    PositiveInt,
    SpecModel,
    raise_problems,
)


class ServingConfig(SpecModel):
    """`serving`: what changes only inference. It never retrains.

    ``tie`` joins layers on one cache slot though each was trained with its own K/V. With
    ``tie_rule: overwrite`` every layer writes the shared slot and the last one wins, as in the
    code of the Character.AI article; with ``owner`` only the first layer of a group writes.
    """

    omitted_defaults: ClassVar[dict[str, Any]] = {"kv_group": None, "kv_residual": None}

    kv_dtype: Annotated[str, OneOf(list_kv_dtypes)] = Field(
        default="model",
        description="How K/V are stored; model keeps the model's dtype.",
        examples=["int8"],
    )
    kv_group: Annotated[PositiveInt, Field(ge=MIN_GROUP)] | None = Field(
        default=None,
        description="Numbers of a head that share a scale, in a kv_dtype with scales. It divides"
        " head_dim. In kivi4 and kivi2 it is also the tokens of a block of keys.",
        examples=[16],
        json_schema_extra={
            "unit": "numbers",
            "computed_default": "32 (at most head_dim) for int4, kivi4 and kivi2, and the"
            " whole head for int8 and fp8",
            "given": {"kv_dtype": "int4"},
        },
    )
    kv_residual: NonNegativeInt | None = Field(
        default=None,
        description="Newest tokens that kivi4 and kivi2 store in the model's dtype.",
        examples=[64],
        json_schema_extra={
            "unit": "tokens",
            "computed_default": "128 for kivi4 and kivi2",
            "given": {"kv_dtype": "kivi2"},
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
            names = _join_names(dtype.is_quantized for dtype in DTYPES.values())
            text = f"has no scales to group in kv_dtype {self.kv_dtype}"
            yield "kv_group", f"{text}; leave it out, or use {names}"
        if self.kv_residual is not None and self.kv_dtype_blocks is None:
            names = _join_names(dtype.default_residual is not None for dtype in DTYPES.values())
            text = f"has no effect in kv_dtype {self.kv_dtype}, which stores every token alike"
            yield "kv_residual", f"{text}; leave it out, or use {names}"

    @property
    def kv_dtype_blocks(self) -> BlockRule | None:
        """When tokens are quantized, in a dtype that quantizes them in blocks; else None."""
        dtype = DTYPES.get(self.kv_dtype)
        if dtype is None or dtype.default_residual is None or dtype.default_group is None:
            return None
        residual = dtype.default_residual if self.kv_residual is None else self.kv_residual
        return BlockRule(self.kv_group or dtype.default_group, residual)

    @property
    def _has_scales(self) -> bool:
        return self.kv_dtype in DTYPES and DTYPES[self.kv_dtype].is_quantized

    def find_storage_problems(self, model: ModelConfig) -> Iterator[FieldMessage]:
        """Yield why K and V of ``model`` cannot be stored this way, by fields of a spec."""
        if not self._has_scales:
            return
        sizes, blocks = model.stored_sizes, self.kv_dtype_blocks
        dtype = DTYPES[self.kv_dtype]
        problem = next(
            filter(None, (dtype.find_size_problem(n, self.kv_group) for n in sizes)), None
        )
        if problem is not None:
            yield f"serving.{'kv_dtype' if self.kv_group is None else 'kv_group'}", problem
        if blocks is None:
            return
        if model.kv != "separate":
            text = "quantizes keys by channel and values by token, so it needs model.kv: separate"
            yield "serving.kv_dtype", f"{text}; use int4 or int8 for what both are views of"
            return
        windows = [layer.window or model.block_size for layer in model.layers]
        longest = min(max(windows), model.block_size)
        if not blocks.quantizes(longest) or not blocks.quantized_tokens(model.block_size):
            most = min(longest - 1, model.block_size - blocks.group)
            text = f"quantizes none of the {longest} tokens that a layer sees, as the newest"
            text = (
                f"{text} {blocks.residual} to {blocks.residual + blocks.group - 1} stay as they are"
            )
            fix = (
                f"use serving.kv_residual: {most} or less"
                if most >= 0
                else "use a smaller kv_group"
            )
            yield "serving.kv_dtype", f"{text}; {fix}"

    def store_as_model(self) -> "ServingConfig":
        """Return the same serving with K and V in the model's dtype."""
        return self.model_copy(update={"kv_dtype": "model", **self.omitted_defaults})


def _join_names(is_named: Iterable[bool]) -> str:
    """Return the dtypes for which it is true, as `a, b or c`."""
    names = [name for name, named in zip(DTYPES, is_named, strict=True) if named]
    return f"{', '.join(names[:-1])} or {names[-1]}"
