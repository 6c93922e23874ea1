"""How one slot stores the tokens of a context: its entries, its bytes, its buffer.

A `SlotPlan` is the one place that knows it: `KVLayout` sums over plans, fingerprints ask them what
is computed, and a cache asks them for buffers. `TokenSlot` stores every token alike. Extensions
add plans that do not, by functions of a layer, its model and its serving (``slot_plans``).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar

from kvlab.humanize import format_count
from kvlab.spec import dtypes
from kvlab.spec.dtypes import KVDtype
from kvlab.spec.layer_config import LayerConfig
from kvlab.spec.quantizers import Quantizer

Term = tuple[str, str]
"""A product of the formula: what a slot holds, and the bytes of each."""


@dataclass(frozen=True)
class SlotPlan(ABC):
    """A slot of layers of one kind under one serving configuration.

    Contexts are tokens of one sequence; ``dtype`` is the model's, used where ``kv_dtype`` is
    ``model``. Bytes are those of one sequence.

    Attributes:
        layer: one that reads the slot: its heads, its window and what a token stores.
        kv_group: numbers of a head that share a scale; None for the default of ``kv_dtype``.
        kv_rotate: the basis in which vectors are stored, of `kvlab.spec.dtypes.ROTATIONS`.
        buffer: the class that stores the tokens, as ``module:class``. It is named, not imported:
            plans do not import torch. It takes the plan and the arguments of `open`.
        has_single_tokens: whether what a query reads of a token depends on that token alone, so
            that several continuations of a text may stand in one pass.
        trained_copies: of the vectors of a token that a training keeps where it reads them as they
            are stored.
    """

    layer: LayerConfig
    kv_dtype: KVDtype = "model"
    kv_group: int | None = None
    kv_rotate: str = "none"

    buffer: ClassVar[str]
    has_single_tokens: ClassVar[bool] = True
    trained_copies: ClassVar[int] = 1

    @property
    def has_causal_queries(self) -> bool:
        """Whether queries of a training attend by causality and a window alone, without a mask, so
        that a backend may keep their probabilities."""
        return True

    def of_place(self, place: int, places: int) -> "SlotPlan":  # noqa: ARG002
        """Return the plan of one of so many slots that have this plan, by its place in depth."""
        return self

    def list_dtypes(self, dtype: str) -> tuple[str | Quantizer, ...]:
        """Return the dtype in which each part of a token of a model of ``dtype`` is stored."""
        return dtypes.list_part_dtypes(self.kv_dtype, len(self.layer.stored), dtype)

    def storage_dtype(self, dtype: str) -> str:
        """Return the dtype in which K and V of a model of ``dtype`` are stored, or two in words."""
        own = self.list_dtypes(dtype)
        return str(own[0]) if len(set(own)) == 1 else f"K {own[0]}, V {own[1]}"

    @abstractmethod
    def token_bytes(self, dtype: str) -> int:
        """Return the bytes of one token: K and V of every head, with scales."""

    @abstractmethod
    def stored_bytes(self, context: int, dtype: str) -> int:
        """Return the bytes that a context takes."""

    def count_seen(self, context: int) -> int:
        """Return how many tokens of a context the query of the newest one attends to."""
        return self.layer.visible_tokens(context)

    def measure_texts(self, lengths: Sequence[int]) -> dict[str, float]:  # noqa: ARG002
        """Return what is to be reported of texts of so many tokens that are served, by metric."""
        return {}

    def read_bytes(self, context: int, dtype: str) -> int:
        """Return the bytes that one layer reads to decode one token, its own included."""
        return self.stored_bytes(context, dtype)

    def written_bytes(self, dtype: str) -> int:
        """Return the bytes that one layer writes to decode one token."""
        return self.token_bytes(dtype)

    def growth_bytes(self, dtype: str) -> int:
        """Return the bytes that each further token of a long context adds."""
        return 0 if self.layer.window is not None else self.token_bytes(dtype)

    @abstractmethod
    def keeps_all_tokens(self, context: int) -> bool:
        """Whether a cache of such a context still has all that any of its first tokens read."""

    @abstractmethod
    def count_units(self, start: int, end: int, context: int) -> int:
        """Return how many entries of a buffer the tokens from ``start`` to ``end`` fill for good.

        They are the entries of `SlotBuffer.list_segment`; 0 where later tokens overwrite them.
        """

    def segment_bytes(self, start: int, end: int, context: int, dtype: str) -> int:
        """Return the bytes of these entries."""
        return self.count_units(start, end, context) * self.token_bytes(dtype)

    @abstractmethod
    def snapshot_bytes(self, length: int, context: int, dtype: str) -> int:
        """Return the bytes of what ``length`` tokens store that further ones overwrite.

        With `segment_bytes` of these tokens, that is all that the next token reads.
        """

    @abstractmethod
    def formula(self, slots: str, context: int, dtype: str) -> list[Term]:
        """Return the arithmetic of `stored_bytes` as products.

        Args:
            slots: how many there are, such as ``2 global slots``.
        """

    def identity(self) -> dict[str, Any]:
        """Return what is computed in another way than by a slot of all tokens, as plain data."""
        stored = dtypes.list_part_dtypes(self.kv_dtype, 2, "model")
        code = " ".join(one.describe() for one in stored if not isinstance(one, str)) or None
        facts = {"kv_group": self.kv_group, "kv_rotate": self.kv_rotate, "kv_code": code}
        return {name: fact for name, fact in facts.items() if fact not in (None, "none")}

    def open(self, rows: int, context: int, dtype: Any, device: Any) -> Any:
        """Return an empty `kvlab.cache.slot_pass.SlotBuffer`.

        Args:
            rows: sequences, of up to ``context`` tokens.
            dtype, device: torch's, of the model.
        """
        return resolve_name(self.buffer)(self, rows, context, dtype, device)


@dataclass(frozen=True)
class TokenSlot(SlotPlan):
    """Every token has an entry, and all are stored alike: as numbers, or as codes with scales.

    Without a window the slot holds every token of the context, with one a ring of
    ``min(window, context)`` beside the entries of sink tokens.
    """

    buffer: ClassVar[str] = "kvlab.cache.kv_buffer:KVBuffer"

    @property
    def window(self) -> int | None:
        """The newest tokens that are held beside the sinks; None for all."""
        return self.layer.window

    @property
    def sinks(self) -> int:
        """The first tokens, which are always held."""
        return self.layer.sink_tokens

    def count_entries(self, context: int) -> int:
        """Return how many tokens of a context have an entry."""
        return context if self.window is None else min(context, self.sinks + self.window)

    def token_bytes(self, dtype: str) -> int:
        return dtypes.token_bytes(self.layer.stored, self.list_dtypes(dtype), self.kv_group)

    def stored_bytes(self, context: int, dtype: str) -> int:
        return self.count_entries(context) * self.token_bytes(dtype)

    def keeps_all_tokens(self, context: int) -> bool:  # noqa: ARG002
        return self.window is None or (self.window == 1 and not self.sinks)

    def count_units(self, start: int, end: int, context: int) -> int:  # noqa: ARG002
        return 0 if self.window is not None else end - start

    def snapshot_bytes(self, length: int, context: int, dtype: str) -> int:  # noqa: ARG002
        if self.window is None:
            return 0
        sinks = min(self.sinks, length)
        first = max(sinks, length - self.window + 1)
        return (sinks + length - first) * self.token_bytes(dtype)

    def formula(self, slots: str, context: int, dtype: str) -> list[Term]:
        count = format_count(self.count_entries(context), "token")
        return [(f"{slots} x {count}", self._token_formula(dtype))]

    def _token_formula(self, dtype: str) -> str:
        """Return the arithmetic of `token_bytes` as text."""
        parts, own = [], self.list_dtypes(dtype)
        for part, name in zip(self.layer.stored, own, strict=True):
            vector = dtypes.find_dtype(name).describe_vector(part.size, self.kv_group)
            parts.append(f"{format_count(part.count, part.name)} x {vector}")
        if len(set(own)) > 1:
            return f"(K: {parts[0]} + V: {parts[1]})"
        if len(parts) == 2 and parts[0] == parts[1]:
            return f"2 (K, V) x {parts[0]}"
        return parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"
