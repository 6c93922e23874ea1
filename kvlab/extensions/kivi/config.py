"""`kv_dtype: kivi4` and `kivi2`: which tokens are quantized when. No torch."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvlab.spec.dtypes import DEFAULT_GROUP, SCALE_BYTES, BlockDType
from kvlab.spec.spec_model import NonNegativeInt, SpecModel

if TYPE_CHECKING:
    from kvlab.spec.dtypes import KVStorage
    from kvlab.spec.model_config import ModelConfig

DEFAULT_RESIDUAL = 128
"""Newest tokens in full precision, as the authors have them."""


class ServingFields(SpecModel):
    """What `serving` gets."""

    omitted_defaults = frozenset({"kv_residual"})

    kv_residual: NonNegativeInt | None = None
    """Newest tokens that kivi4 and kivi2 store in the model's dtype.
    Unit: tokens. Default: 128 for kivi4 and kivi2. Example: 64, kv_dtype: kivi2"""


class TrainingFields(SpecModel):
    """What `training` gets."""

    omitted_defaults = frozenset({"kv_residual"})

    kv_residual: NonNegativeInt | None = None
    """As serving.kv_residual, of training.kv_dtype. It does not follow serving's.
    Unit: tokens. Default: 128 for kivi4 and kivi2. Example: 64, kv_dtype: kivi2"""


@dataclass(frozen=True)
class BlockRule:
    """When KIVI (arXiv 2402.02750) quantizes tokens: in blocks, once enough newer ones follow.

    The first ``quantized_tokens(n)`` of n tokens are quantized. So the newest ``residual`` to
    ``residual + group - 1`` tokens are in full precision.

    Attributes:
        residual: newest tokens that are always in full precision.
    """

    group: int
    residual: int

    def quantized_tokens(self, tokens: int) -> int:
        """Return how many of a row's ``tokens``, the first, are quantized."""
        return max(0, tokens - self.residual) // self.group * self.group

    def quantizes(self, window: int | None) -> bool:
        """Return whether layers that see ``window`` tokens (None: all) see any quantized ones."""
        return window is None or window > self.residual

    def first_full(self, tokens: int, window: int | None) -> int:
        """Return the first of a row's tokens in full precision, in a slot of such layers."""
        return self.quantized_tokens(tokens) if self.quantizes(window) else 0

    def snapshot(self, tokens: int, window: int | None) -> tuple[range, range]:
        """Return the blocks, and the tokens in full precision, that further tokens overwrite.

        They are what the next token reads of a row; without a window, blocks stay for good. A
        block that reaches into the window is quantized with the tokens that have left it.
        """
        first_seen = 0 if window is None else max(0, tokens - window + 1)
        if not self.quantizes(window):
            return range(0), range(first_seen, tokens)
        first_block, full = first_seen // self.group, self.first_full(tokens, window)
        blocks = range(0) if window is None else range(first_block, full // self.group)
        return blocks, range(max(full, first_block * self.group), tokens)

    def count_read(self, tokens: int, window: int | None) -> tuple[int, int]:
        """Return the blocks, and the tokens in full precision, that the newest token's step reads.

        The step that completes a block reads the block's tokens in full precision, to quantize
        them.
        """
        first_seen, full = max(0, tokens - (window or tokens)), self.first_full(tokens - 1, window)
        blocks = max(0, full // self.group - first_seen // self.group)
        completes = self.first_full(tokens, window) > full
        return blocks, tokens - (full if completes else max(first_seen, full))

    def capacity(self, tokens: int, window: int | None) -> tuple[int, int]:
        """Return the blocks, and the tokens in full precision, that a slot has place for."""
        if not self.quantizes(window):
            return 0, min(tokens, window or tokens)
        blocks = self.quantized_tokens(tokens) // self.group
        if window is not None:
            blocks = min(blocks, -(-(window - self.residual) // self.group))
        return blocks, min(tokens, self.residual + self.group - 1)

    def find_problems(self, model: "ModelConfig", section: str) -> Iterator[str]:
        """Yield why K and V of ``model`` cannot be quantized so, or would never be."""
        windows = [n.window or model.block_size for n in model.layers if n.stores_tokens]
        longest = min(max(windows), model.block_size)
        if not model.kv_form.stores_keys:
            text = "quantizes keys by channel and values by token, so it needs model.kv: separate"
            yield f"{text}; use int4 or int8 for what both are views of"
        elif model.sink_tokens:
            text = "keeps the newest tokens in full precision, not the first ones"
            yield f"{text}; leave model.sink_tokens out, or use int4 or int8"
        elif not (self.quantizes(longest) and self.quantized_tokens(model.block_size)):
            most = min(longest - 1, model.block_size - self.group)
            text = f"quantizes none of the {longest} tokens that a layer sees, as the newest"
            text = f"{text} {self.residual} to {self.residual + self.group - 1} stay as they are"
            fix = f"{section}.kv_residual: {most} or less" if most >= 0 else "a smaller kv_group"
            yield f"{text}; use {fix}"


class KIVIDType(BlockDType):
    """Codes of 4 or 2 bits, with a scale and a zero point for each group."""

    def make_rule(self, kv: "KVStorage") -> BlockRule:
        """Return when tokens are quantized."""
        residual = self.default_residual if kv.residual is None else kv.residual
        return BlockRule(kv.group or DEFAULT_GROUP, residual)

    def find_size_problem(
        self, size: int, group: int | None, name: str, section: str
    ) -> str | None:
        return super().find_size_problem(size, self.group_size(size, group), name, section)

    def identity(self, kv: "KVStorage") -> dict[str, Any]:
        return {"kv_blocks": asdict(self.make_rule(kv))}

    def find_model_problems(
        self, kv: "KVStorage", model: "ModelConfig", section: str
    ) -> Iterator[str]:
        return self.make_rule(kv).find_problems(model, section)


def _make_dtype(codes_per_byte: int) -> KIVIDType:
    folder = "kvlab.extensions.kivi"
    stored = f"{folder}.buffers:KIVIBuffer", 2 * SCALE_BYTES, codes_per_byte, DEFAULT_GROUP
    one_shot_pass = f"{folder}.training_pass:BlockwisePass"
    return KIVIDType(1, "uint8", *stored, DEFAULT_RESIDUAL, one_shot_pass)


KIVI4, KIVI2 = _make_dtype(2), _make_dtype(4)
