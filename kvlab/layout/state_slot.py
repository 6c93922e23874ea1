"""A slot that stores a state of fixed size, into which a layer folds all its tokens."""

from dataclasses import dataclass
from typing import ClassVar

from kvlab.humanize import format_count
from kvlab.layout.slot_plan import SlotPlan, Term
from kvlab.spec.dtypes import DTYPES


@dataclass(frozen=True)
class StateSlot(SlotPlan):
    """What a layer's mixer keeps of all tokens before, of as many bytes for any context.

    It is in float32, or in the model's dtype if that is wider: a `serving.kv_dtype` is of tokens.
    Every token changes it, so a prefix is reused as a snapshot alone, never by its tokens.
    """

    buffer: ClassVar[str] = "kvlab.cache.state_buffer:StateBuffer"
    has_single_tokens: ClassVar[bool] = False

    @property
    def has_causal_queries(self) -> bool:
        return False

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the tensors of one row."""
        return self.layer.mixer.state(self.layer)

    def storage_dtype(self, dtype: str) -> str:
        return self.layer.mixer.state_dtype(dtype)

    def token_bytes(self, dtype: str) -> int:  # noqa: ARG002
        return 0

    def stored_bytes(self, context: int, dtype: str) -> int:  # noqa: ARG002
        return self.layer.mixer.state_bytes(self.layer, dtype)

    def written_bytes(self, dtype: str) -> int:
        return self.stored_bytes(1, dtype)

    def keeps_all_tokens(self, context: int) -> bool:  # noqa: ARG002
        return False

    def count_units(self, start: int, end: int, context: int) -> int:  # noqa: ARG002
        return 0

    def snapshot_bytes(self, length: int, context: int, dtype: str) -> int:
        return self.stored_bytes(context, dtype) if length else 0

    def formula(self, slots: str, context: int, dtype: str) -> list[Term]:  # noqa: ARG002
        size = format_count(DTYPES[self.storage_dtype(dtype)].item_bytes, "byte")
        states = (f"{' x '.join(map(str, shape))} x {size}" for shape in self.shapes)
        return [(slots, f"({' + '.join(states)} of state)")]
