"""The contract of one cache slot: what it stores, and its part in a forward pass.

A `SlotBuffer` holds the memory of one slot. For each pass it makes a `SlotPass`, which takes the
tokens of the pass and says what queries attend to. `CachedPass` hands each layer to its slot, so
slots of any kind stand side by side in one pass.

Shapes: B rows, H heads of a part, C tokens of this pass, D width of a part.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from kvlab.cache.attention_pass import AttentionPass, KVContext
from kvlab.layout import KVLayout

EntryRange = tuple[tuple[Tensor, ...], list[slice]]
"""Tensors (B, H, S, ...) and the entries of a row that are copied from or to each of them."""


class PassRows:
    """The rows of one pass through a cache: what they held before it, and what it adds.

    Rows are left-aligned: row b's tokens are at positions 0, 1, ... of their own. Padding stands at
    the end of a chunk. It is neither stored nor seen by real tokens, and its outputs are
    meaningless.

    Args:
        past: tokens that each row held before.
        added: how many of this pass's tokens are real in each row.
        count: tokens C of this pass.
        is_even: whether all rows held as many, and all tokens are real.

    Attributes:
        start: tokens that the longest row held before.
        end: tokens that the longest row holds after.
        position_limit: a bound above all positions; padding of the longest row is beyond ``end``.
    """

    def __init__(
        self, past: list[int], added: list[int], count: int, device: torch.device, *, is_even: bool
    ):
        self.past, self.added, self.count = past, added, count
        self.device, self.is_even = device, is_even
        self.start = max(past)
        self.end = max(held + new for held, new in zip(past, added, strict=True))
        self.position_limit = self.start + count
        self._shared: dict[Hashable, Any] = {}

    @cached_property
    def lengths(self) -> Tensor:
        """``past`` on the device, (B,)."""
        return torch.tensor(self.past).to(self.device, non_blocking=True)

    @cached_property
    def positions(self) -> Tensor:
        """Of this pass's tokens: (C,), or (B, C) where rows differ."""
        if self.is_even:
            return torch.arange(self.start, self.end, device=self.device)
        return self.row_positions

    @cached_property
    def row_positions(self) -> Tensor:
        """Of this pass's tokens, padding included, (B, C)."""
        return self.lengths[:, None] + torch.arange(self.count, device=self.device)

    @cached_property
    def is_real(self) -> Tensor:
        """Which tokens are real, (B, C)."""
        added = torch.tensor(self.added).to(self.device, non_blocking=True)
        return torch.arange(self.count, device=self.device) < added[:, None]

    def share(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Return ``make()``, called once for all slots of the pass that ask for ``name``."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]


class SlotPass(ABC):
    """One slot in one pass.

    A chunk of more than one token must not overwrite what its first queries still see, before the
    slot's last reader has attended. What it stores waits until `finish`.
    """

    @abstractmethod
    def write(self, parts: tuple[Tensor, ...]) -> None:
        """Make ``parts``, each (B, H, C, D), what the slot holds of this pass's tokens."""

    def observe(self, queries: Tensor, sink: Tensor | None) -> None:  # noqa: B027
        """Take the queries of a reader; see `AttentionPass.observe_queries`."""

    @abstractmethod
    def read(self) -> KVContext:
        """Return what a reader attends to."""

    @abstractmethod
    def key_positions(self) -> Tensor:
        """Return the positions of what `read` returns: (P + C,), or (B, P + C)."""

    def finish(self) -> None:  # noqa: B027
        """Store what waits: the last reader has attended."""


class SlotBuffer(ABC):
    """What one slot stores.

    Attributes:
        has_fixed_shapes: whether a decode step reads and writes tensors of fixed shapes, so that it
            can be captured or compiled (`StaticPass`).
    """

    has_fixed_shapes = False

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that is stored, in the order of the parts."""

    @abstractmethod
    def begin_pass(self, rows: PassRows) -> SlotPass:
        """Return the slot's part in a pass."""

    @abstractmethod
    def list_segment(self, start: int, end: int) -> list[EntryRange]:
        """Return where the tokens from ``start`` to ``end`` are stored, if never overwritten."""

    @abstractmethod
    def list_snapshot(self, length: int) -> list[EntryRange]:
        """Return what a row of ``length`` tokens stores and later tokens will overwrite.

        The segments before it and the snapshot are all that the next token reads.
        """

    @abstractmethod
    def map_rows(self, select: Callable[[Tensor], Tensor]) -> Self:
        """Return a buffer of what ``select`` returns of every tensor (B, ...): some of its rows."""


class CachedPass(AttentionPass):
    """A pass through a cache: slots and writers come from the layout.

    Args:
        buffers: by the number of the layer that owns each slot.
        advance: called once all layers are done.
    """

    def __init__(
        self,
        layout: KVLayout,
        buffers: dict[int, SlotBuffer],
        rows: PassRows,
        advance: Callable[[], None],
    ):
        self._layout, self._buffers, self._rows, self._advance = layout, buffers, rows, advance
        self._slots: dict[int, SlotPass] = {}
        self.end, self.position_limit = rows.end, rows.position_limit
        self.positions = rows.positions

    def _find_slot(self, layer: int) -> SlotPass:
        owner = self._layout.owners[layer]
        if owner not in self._slots:
            self._slots[owner] = self._buffers[owner].begin_pass(self._rows)
        return self._slots[owner]

    def writes_kv(self, layer: int) -> bool:
        return self._layout.writers[layer]

    def write_kv(self, layer: int, *parts: Tensor) -> None:
        self._find_slot(layer).write(parts)

    def observe_queries(self, layer: int, queries: Tensor, sink: Tensor | None = None) -> None:
        self._find_slot(layer).observe(queries, sink)

    def read_kv(self, layer: int) -> KVContext:
        return self._find_slot(layer).read()

    def key_positions(self, layer: int) -> Tensor:
        return self._find_slot(layer).key_positions()

    def end_layer(self, layer: int) -> None:
        if layer in self._layout.last_readers:
            self._slots.pop(self._layout.owners[layer]).finish()

    def finish(self) -> None:
        self._advance()


def make_position_mask(
    key_positions: Tensor, positions: Tensor, window: int | None = None, sinks: int = 0
) -> Tensor:
    """Return (B, 1, C, keys) of bool: the keys that queries at ``positions`` (B, C) see.

    Args:
        key_positions: (B, keys), negative where there is none.
        window: tokens that a query sees, itself included; None for all before it.
        sinks: the first tokens, which it sees as well.
    """
    keys, queries = key_positions[:, None, :], positions[:, :, None]
    visible = (keys >= 0) & (keys <= queries)
    if window is not None:
        visible &= (queries - keys < window) | (keys < sinks)
    return visible[:, None]


def see_something(visible: Tensor) -> Tensor:
    """Let padding of an empty row see one key: without any, its softmax would be NaN."""
    visible[..., 0] |= ~visible.any(-1)
    return visible
