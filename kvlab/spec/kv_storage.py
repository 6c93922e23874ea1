"""How K and V are stored: the three settings that `training` and `serving` have in common.

`training.kv_dtype` rounds K and V in the forward pass of training as a cache would store them, and
`serving.kv_dtype` is what the cache does store. Each section has its own dtype, group and residual,
and neither takes over a value of the other: a change of `serving` never retrains.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvlab.spec.dtypes import DTYPES, MODEL_DTYPE, BlockRule
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.spec_model import FieldMessage


@dataclass(frozen=True)
class KVStorage:
    """How K and V are stored.

    Attributes:
        dtype: a name of `kvlab.spec.dtypes.DTYPES`, or ``model`` for the model's dtype.
        group: numbers of a head that share a scale; None for the dtype's default.
        residual: newest tokens in full precision; None for the dtype's default.
    """

    dtype: str = "model"
    group: int | None = None
    residual: int | None = None

    @property
    def blocks(self) -> BlockRule | None:
        """When tokens are quantized, in a dtype that quantizes them in blocks; else None."""
        dtype = DTYPES.get(self.dtype)
        if dtype is None or dtype.default_residual is None or dtype.default_group is None:
            return None
        residual = dtype.default_residual if self.residual is None else self.residual
        return BlockRule(self.group or dtype.default_group, residual)

    @property
    def has_scales(self) -> bool:
        """Whether the dtype has scales, for each group of numbers."""
        return self.dtype in DTYPES and DTYPES[self.dtype].is_quantized

    def resolve_group(self, model: ModelConfig) -> int | None:
        """Return the group of the scales, or None where it is the dtype's default in every layer.

        Different spellings of one format give one layout, and so one trial.
        """
        if self.group is None:
            return None
        dtype, sizes = DTYPES[self.dtype], model.stored_sizes
        is_default = all(dtype.group_size(n, self.group) == dtype.group_size(n) for n in sizes)
        return None if is_default else self.group

    def identity(self, model: ModelConfig) -> dict[str, Any]:
        """Return what is computed in another way than with K and V in the model's dtype.

        Empty for the widest dtype that a model computes in, which rounds nothing.
        """
        if self.dtype in ("model", MODEL_DTYPE):
            return {}
        facts: dict[str, Any] = {"kv_dtype": self.dtype}
        if (group := self.resolve_group(model)) is not None:
            facts["kv_group"] = group
        if self.blocks is not None:
            facts["kv_blocks"] = {"group": self.blocks.group, "residual": self.blocks.residual}
        return facts

    def find_setting_problems(self) -> Iterator[FieldMessage]:
        """Yield which settings say nothing in this dtype, by fields of a section."""
        if self.group is not None and not self.has_scales:
            names = _join_names(dtype.is_quantized for dtype in DTYPES.values())
            text = f"has no scales to group in kv_dtype {self.dtype}"
            yield "kv_group", f"{text}; leave it out, or use {names}"
        if self.residual is not None and self.blocks is None:
            names = _join_names(dtype.default_residual is not None for dtype in DTYPES.values())
            text = f"has no effect in kv_dtype {self.dtype}, which stores every token alike"
            yield "kv_residual", f"{text}; leave it out, or use {names}"

    def find_storage_problems(self, model: ModelConfig, section: str) -> Iterator[FieldMessage]:
        """Yield why K and V of ``model`` cannot be stored this way, by fields of a spec.

        Args:
            section: of the spec, ``serving`` or ``training``.
        """
        if not self.has_scales:
            return
        sizes, dtype = model.stored_sizes, DTYPES[self.dtype]
        found = (dtype.find_size_problem(n, self.group, name, section) for n, name in sizes.items())
        problem = next(filter(None, found), None)
        if problem is not None:
            yield f"{section}.{'kv_dtype' if self.group is None else 'kv_group'}", problem
        if self.blocks is not None:
            problem = _find_block_problem(self.blocks, model, section)
            if problem is not None:
                yield f"{section}.kv_dtype", problem


def _find_block_problem(blocks: BlockRule, model: ModelConfig, section: str) -> str | None:
    """Return why K and V of ``model`` cannot be quantized in blocks, or would never be."""
    if model.kv != "separate":
        text = "quantizes keys by channel and values by token, so it needs model.kv: separate"
        return f"{text}; use int4 or int8 for what both are views of"
    if model.sink_tokens:
        text = "keeps the newest tokens in full precision, not the first ones"
        return f"{text}; leave model.sink_tokens out, or use int4 or int8"
    windows = [layer.window or model.block_size for layer in model.layers]
    longest = min(max(windows), model.block_size)
    if blocks.quantizes(longest) and blocks.quantized_tokens(model.block_size):
        return None
    most = min(longest - 1, model.block_size - blocks.group)
    text = f"quantizes none of the {longest} tokens that a layer sees, as the newest"
    text = f"{text} {blocks.residual} to {blocks.residual + blocks.group - 1} stay as they are"
    fix = f"use {section}.kv_residual: {most} or less" if most >= 0 else "use a smaller kv_group"
    return f"{text}; {fix}"


def _join_names(is_named: Iterable[bool]) -> str:
    """Return the dtypes for which it is true, as `a, b or c`."""
    names = [name for name, named in zip(DTYPES, is_named, strict=True) if named]
    return f"{', '.join(names[:-1])} or {names[-1]}"
