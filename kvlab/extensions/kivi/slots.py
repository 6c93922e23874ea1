"""A slot that stores old tokens in blocks of codes, and the newest in full (KIVI)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from kvlab.extensions.kivi.config import BlockRule, KIVIDType
from kvlab.humanize import format_count
from kvlab.layout.slot_plan import SlotPlan, Term
from kvlab.spec.dtypes import DTYPES, find_dtype, token_bytes
from kvlab.spec.layer_config import LayerConfig
from kvlab.spec.model_config import ModelConfig
from kvlab.spec.serving_config import ServingConfig


@dataclass(frozen=True, kw_only=True)
class BlockSlot(SlotPlan):
    """Tokens are quantized in blocks, once enough newer ones follow (arXiv 2402.02750).

    Attributes:
        rule: when.
    """

    rule: BlockRule
    buffer: ClassVar[str] = "kvlab.extensions.kivi.buffers:KIVIBuffer"
    has_single_tokens: ClassVar[bool] = False
    trained_copies: ClassVar[int] = 2

    @property
    def has_causal_queries(self) -> bool:
        return not self.rule.quantizes(self.layer.window)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: keys with scales by channel, values with scales by token."""
        key_dtype, *dtypes = self.list_dtypes("")
        stored, tokens = find_dtype(key_dtype), self.rule.group
        key, *others = self.layer.stored
        codes = tokens * (key.size // stored.numbers_per_item) * stored.item_bytes
        keys = key.count * (codes + key.size * stored.scale_bytes)
        return keys + tokens * token_bytes(others, dtypes, self.kv_group)

    def full_token_bytes(self, dtype: str) -> int:
        """Return the bytes of one token in full precision."""
        return self.layer.store_width * DTYPES[dtype].item_bytes

    def token_bytes(self, dtype: str) -> int:
        """Return the share of a quantized token in its block, rounded up."""
        if not self.rule.quantizes(self.layer.window):
            return self.full_token_bytes(dtype)
        return -(-self.block_bytes // self.rule.group)

    def _sum(self, counts: tuple[int, int], dtype: str) -> int:
        blocks, full = counts
        return blocks * self.block_bytes + full * self.full_token_bytes(dtype)

    def stored_bytes(self, context: int, dtype: str) -> int:
        return self._sum(self.rule.capacity(context, self.layer.window), dtype)

    def read_bytes(self, context: int, dtype: str) -> int:
        return self._sum(self.rule.count_read(context, self.layer.window), dtype)

    def written_bytes(self, dtype: str) -> int:
        """Return the bytes of a token in full precision, and later in its block."""
        is_quantized = self.rule.quantizes(self.layer.window)
        return self.token_bytes(dtype) + (self.full_token_bytes(dtype) if is_quantized else 0)

    def keeps_all_tokens(self, context: int) -> bool:  # noqa: ARG002
        """Return False: tokens enter their block when they are old."""
        return False

    def count_units(self, start: int, end: int, context: int) -> int:  # noqa: ARG002
        """Return the blocks that become complete."""
        if self.layer.window is not None:
            return 0
        added = self.rule.quantized_tokens(end) - self.rule.quantized_tokens(start)
        return added // self.rule.group

    def segment_bytes(self, start: int, end: int, context: int, dtype: str) -> int:  # noqa: ARG002
        return self.count_units(start, end, context) * self.block_bytes

    def snapshot_bytes(self, length: int, context: int, dtype: str) -> int:  # noqa: ARG002
        blocks, full = self.rule.snapshot(length, self.layer.window)
        return self._sum((len(blocks), len(full)), dtype)

    def formula(self, slots: str, context: int, dtype: str) -> list[Term]:
        blocks, full = self.rule.capacity(context, self.layer.window)
        text = f"{full} tokens x {self.full_token_bytes(dtype):,} bytes in full precision"
        if blocks:
            size = f"{self.block_bytes:,} bytes of {self.rule.group} tokens"
            text = f"{format_count(blocks, 'block')} x {size} + {text}"
        return [(slots, f"({text})")]

    def identity(self) -> dict[str, Any]:
        blocks = {"group": self.rule.group, "residual": self.rule.residual}
        return {**super().identity(), "kv_blocks": blocks}


def plan_slot(layer: LayerConfig, model: ModelConfig, serving: ServingConfig) -> BlockSlot | None:
    """Return the slot of a layer in one of KIVI's dtypes."""
    kv, dtype = serving.kv, serving.kv.block_dtype
    if not isinstance(dtype, KIVIDType):
        return None
    stored = layer, kv.dtype, kv.resolve_group(model), kv.rotate
    return BlockSlot(*stored, rule=dtype.make_rule(kv))
