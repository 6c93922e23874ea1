"""The buffers of one cache slot, linear or a ring: one for each part that a token stores.

The token at position p of a row is stored in entry ``p mod S``. A linear buffer has as many
entries as the cache may hold tokens, so nothing is ever overwritten. A ring has
``min(window, max_length)`` entries, and a new token overwrites the one that left the window. Sink
tokens have entries of their own before those of the ring, which they never leave.

Parts are K and V, or one tensor that both are views of.

Shapes: B rows, H heads of a part, S entries, D width of a part.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from kvlab.cache.formats import KVFormat, ScaledCodes, Stored
from kvlab.spec.layer_config import LayerConfig

EncodedKV = tuple[tuple[Tensor, ...], ...]
"""The parts of some tokens, each encoded by its format."""

Index = tuple[Any, ...]
"""An index into (B, H, S): slices, or tensors of rows and entries."""

EntryRange = tuple[tuple[Tensor, ...], list[slice]]
"""Tensors (B, H, S, ...) and the entries of a row that are copied from or to each of them."""


def index_kv(encoded: EncodedKV, index: Index) -> EncodedKV:
    """Return ``encoded`` with every tensor indexed."""
    return tuple(tuple(tensor[index] for tensor in part) for part in encoded)


def slice_tokens(encoded: EncodedKV, tokens: slice) -> EncodedKV:
    """Return views of ``tokens``, or entries, of every tensor (B, H, S, D)."""
    start, count = tokens.start, tokens.stop - tokens.start
    # it takes less time than an index of slices, which counts where tokens come one by one
    return tuple([tuple([t.narrow(2, start, count) for t in part]) for part in encoded])


def concatenate_parts(past: tuple[Tensor, ...], current: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return each part of ``past`` followed by that of ``current``, along the tokens."""
    return tuple(torch.cat(pair, 2) for pair in zip(past, current, strict=True))


class SlotBuffer(ABC):
    """What one slot stores, whatever its format."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that is stored, in the order of the parts."""

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


class KVBuffer(SlotBuffer):
    """The parts of one slot, each (B, H, S, D).

    Args:
        layer: one that reads the slot, which holds as many entries as the layer sees.
        max_length: the most tokens of a row.
        kv_format: how each part is encoded.
        dtype: of the decoded values.

    Attributes:
        parts: the tensors that the format allocated for each.
        sinks: entries of the first tokens.
        ring: entries of the others.
    """

    def __init__(
        self,
        layer: LayerConfig,
        batch_size: int,
        max_length: int,
        kv_format: KVFormat,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.format, self.dtype, self.window = kv_format, dtype, layer.window
        self.size = layer.visible_tokens(max_length)
        self.parts: EncodedKV = tuple(
            kv_format.allocate((batch_size, part.count, self.size, part.size), device)
            for part in layer.stored
        )
        self.sinks = min(layer.sink_tokens, self.size)
        self.ring = max(1, self.size - self.sinks)
        shapes = {part[0].shape for part in self.parts}
        self._has_codes_alike = kv_format.has_codes and len(self.parts) > 1 and len(shapes) == 1

    @property
    def is_ring(self) -> bool:
        """Whether a new token may overwrite one that has left the window."""
        return self.window is not None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(chain(*self.parts))

    def encode(self, parts: Sequence[Tensor]) -> EncodedKV:
        """Encode parts (B, H, T, D)."""
        is_compiling = torch.compiler.is_compiling()  # whose one kernel has no calls to save
        if self._has_codes_alike and parts[0].shape[2] == 1 and not is_compiling:
            together = self.format.encode(torch.stack(tuple(parts)))
            return tuple(zip(*(tensor.unbind() for tensor in together), strict=True))
        return tuple([self.format.encode(part) for part in parts])

    def decode(self, encoded: EncodedKV) -> tuple[Tensor, ...]:
        """Decode the parts to the model's dtype."""
        return tuple([self.format.decode(part, self.dtype) for part in encoded])

    def read(self, entries: slice) -> tuple[Tensor, ...]:
        """Return the parts (B, H, entries, D) in storage order, not a ring's token order."""
        return self.decode(slice_tokens(self.parts, entries))

    def read_step(self, entries: slice) -> tuple[Stored, ...]:
        """Return the parts for one query of each row: as codes where they are stored so."""
        stored = slice_tokens(self.parts, entries)
        if self.format.has_codes:
            return tuple([ScaledCodes(*part) for part in stored])
        return self.decode(stored)

    def write(self, index: Index, encoded: EncodedKV) -> None:
        """Store encoded parts at ``index``."""
        for stored, new in zip(chain(*self.parts), chain(*encoded), strict=True):
            stored[index] = new

    def find_entries(self, positions: Tensor) -> Tensor:
        """Return the entries that tokens at ``positions`` are stored in."""
        in_ring = self.sinks + (positions - self.sinks) % self.ring
        return torch.where(positions < self.sinks, positions, in_ring) if self.sinks else in_ring

    def read_past(self, end: int) -> tuple[Tensor, ...]:
        """Return the parts of the tokens before position ``end`` that are held, in token order."""
        if end <= self.size:
            return self.read(slice(0, end))
        held = torch.cat([torch.arange(self.sinks), torch.arange(end - self.ring, end)])
        entries = self.find_entries(held).to(self.tensors[0].device)
        return self.decode(index_kv(self.parts, (slice(None), slice(None), entries)))

    def write_tokens(self, start: int, encoded: EncodedKV) -> None:
        """Store consecutive tokens from position ``start`` on, except those that would be
        overwritten at once."""
        count = encoded[0][0].shape[2]
        if count == 1 or start + count <= self.size:
            in_ring = self.sinks + (start - self.sinks) % self.ring
            entry = start if start < self.size else in_ring
            for stored, new in zip(chain(*self.parts), chain(*encoded), strict=True):
                stored.narrow(2, entry, count).copy_(new)
            return
        positions = torch.arange(start, start + count)
        is_kept = (positions < self.sinks) | (positions >= start + count - self.ring)
        kept, device = positions[is_kept], self.tensors[0].device
        tokens, entries = (kept - start).to(device), self.find_entries(kept).to(device)
        places = (slice(None), slice(None))
        self.write((*places, entries), index_kv(encoded, (*places, tokens)))

    def stored_positions(self, lengths: Tensor) -> Tensor:
        """Return the token position that each entry holds, (B, S), or -1 where it is empty.

        Args:
            lengths: (B,) tokens held by each row.
        """
        last = lengths[:, None] - 1
        entries = torch.arange(self.size, device=lengths.device)
        positions = last - (last - entries) % self.ring
        if not self.sinks:
            return positions.clamp_min(-1)
        positions = torch.where(entries < self.sinks, entries, positions)
        is_held = (positions <= last) & (positions >= entries.clamp_max(self.sinks))
        return torch.where(is_held, positions, -1)

    def list_segment(self, start: int, end: int) -> list[EntryRange]:
        return [] if self.is_ring else [(self.tensors, [slice(start, end)])]

    def list_snapshot(self, length: int) -> list[EntryRange]:
        if self.window is None:
            return []
        sinks = min(self.sinks, length)
        first_seen = max(sinks, length - self.window + 1)
        ring = list_ring_entries(first_seen - sinks, length - sinks, self.ring)
        entries = [slice(0, sinks)] if sinks else []
        entries += [slice(sinks + part.start, sinks + part.stop) for part in ring]
        return [(self.tensors, entries)] if entries else []

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> Self:
        rows = copy.copy(self)
        rows.parts = tuple(tuple(map(select, part)) for part in self.parts)
        return rows


def list_ring_entries(start: int, end: int, size: int) -> list[slice]:
    """Return the entries of positions ``start`` to ``end`` in a ring of ``size`` entries."""
    first, count = start % size, end - start
    before_wrap = min(count, size - first)
    entries = [slice(first, first + before_wrap), slice(0, count - before_wrap)]
    return [part for part in entries if part.stop > part.start]


def as_bytes(stored: Tensor) -> Tensor:
    """Return float8 as bytes, since torch has few operations for float8, and others unchanged."""
    is_float8 = stored.dtype.is_floating_point and stored.itemsize == 1
    return stored.view(torch.uint8) if is_float8 else stored
