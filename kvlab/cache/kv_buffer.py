"""The buffers of one cache slot, linear or a ring: one for each part that a token stores.

The token at position p of a row is stored in entry ``p mod S``. A linear buffer has as many
entries as the cache may hold tokens, so nothing is ever overwritten. A ring has
``min(window, max_length)`` entries, and a new token overwrites the one that left the window. Sink
tokens have entries of their own before those of the ring, which they never leave.

Parts are K and V, or one tensor that both are views of.

Shapes: B rows, H heads of a part, S entries, D width of a part.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from kvlab.cache.attention_pass import KVContext
from kvlab.cache.formats import KVFormat, RotatedFormat, Stored, get_format, make_matrices
from kvlab.cache.slot_pass import (
    EntryRange,
    PassRows,
    SlotBuffer,
    SlotPass,
    make_position_mask,
    see_something,
)
from kvlab.layout.slot_plan import TokenSlot

EncodedKV = tuple[tuple[Tensor, ...], ...]
"""The parts of some tokens, each encoded by its format."""

Index = tuple[Any, ...]
"""An index into (B, H, S): slices, or tensors of rows and entries."""


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


class KVBuffer(SlotBuffer):
    """The parts of one slot, each (B, H, S, D).

    Args:
        plan: how many entries a context takes, of what.
        context: the most tokens of a row.
        dtype: of the decoded values.

    Attributes:
        formats: of each part.
        parts: the tensors that its format allocated for each.
        window: tokens that a query sees beside the sinks, itself included; None for all.
        sinks: entries of the first tokens.
        ring: entries of the others.
    """

    has_fixed_shapes = True

    def __init__(
        self,
        plan: TokenSlot,
        batch_size: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        stored, self.dtype = plan.layer.stored, dtype
        dtypes = plan.list_dtypes(str(dtype).removeprefix("torch."))
        self.formats: list[KVFormat] = [get_format(name, plan.kv_group) for name in dtypes]
        if matrices := make_matrices(plan, device):
            self.formats = [*map(RotatedFormat, self.formats, matrices)]
        self.has_fixed_shapes &= all(one.has_fixed_shapes for one in self.formats)
        self.window, self.size = plan.window, plan.count_entries(context)
        self.parts: EncodedKV = tuple(
            kv_format.allocate((batch_size, part.count, self.size, part.size), device)
            for kv_format, part in zip(self.formats, stored, strict=True)
        )
        self.sinks = min(plan.sinks, self.size)
        self.ring = max(1, self.size - self.sinks)
        kinds = {(name, part[0].shape) for name, part in zip(dtypes, self.parts, strict=True)}
        has_codes = self.formats[0].has_codes
        self._has_codes_alike = has_codes and len(self.parts) > 1 and len(kinds) == 1

    @property
    def is_ring(self) -> bool:
        """Whether a new token may overwrite one that has left the window."""
        return self.window is not None

    @property
    def entry_rule(self) -> Hashable:
        """What decides in which entries tokens are stored; buffers of one rule store them alike."""
        return type(self), self.sinks, self.ring

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(chain(*self.parts))

    def encode(self, parts: Sequence[Tensor]) -> EncodedKV:
        """Encode parts (B, H, T, D)."""
        is_compiling = torch.compiler.is_compiling()  # whose one kernel has no calls to save
        if self._has_codes_alike and parts[0].shape[2] == 1 and not is_compiling:
            together = self.formats[0].encode(torch.stack(tuple(parts)))
            return tuple(zip(*(tensor.unbind() for tensor in together), strict=True))
        return tuple([f.encode(part) for f, part in zip(self.formats, parts, strict=True)])

    def decode(self, encoded: EncodedKV) -> tuple[Tensor, ...]:
        """Decode the parts to the model's dtype."""
        coded = zip(self.formats, encoded, strict=True)
        return tuple([kv_format.decode(part, self.dtype) for kv_format, part in coded])

    def read(self, entries: slice) -> tuple[Tensor, ...]:
        """Return the parts (B, H, entries, D) in storage order, not a ring's token order."""
        return self.decode(slice_tokens(self.parts, entries))

    def read_step(self, entries: slice) -> tuple[Stored, ...]:
        """Return the parts for one query of each row: as codes where they are stored so."""
        stored = zip(self.formats, slice_tokens(self.parts, entries), strict=True)
        return tuple([kv_format.view(part, self.dtype) for kv_format, part in stored])

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

    def write_newest(self, rows: PassRows, encoded: EncodedKV, recent: int) -> None:
        """Store of each row the real tokens that are sinks or among the last ``recent``."""

        def find() -> list[Tensor]:
            # on the host, which knows all lengths and would otherwise wait for the device
            starts, added = (torch.tensor(n)[:, None] for n in (rows.past, rows.added))
            index = torch.arange(rows.count)
            positions = starts + index
            is_kept = (index >= added - recent) | (positions < self.sinks)
            row, token = (is_kept & (index < added)).nonzero(as_tuple=True)
            found = row, token, self.find_entries(positions[row, token])
            return [t.to(rows.device, non_blocking=True) for t in found]

        row, token, entry = rows.share((self.entry_rule, recent), find)
        self.write((row, slice(None), entry), index_kv(encoded, (row, slice(None), token)))

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

    def begin_pass(self, rows: PassRows) -> SlotPass:
        return (EvenPass if rows.is_even else RaggedPass)(self, rows)

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


class TokenPass(SlotPass):
    """What a `KVBuffer` does alike in all passes.

    A chunk of more than one token enters a ring at the end. All others are stored at once, and
    queries read the buffer itself.
    """

    def __init__(self, buffer: KVBuffer, rows: PassRows):
        self._buffer, self._rows = buffer, rows
        self._pending: EncodedKV | None = None

    def write(self, parts: tuple[Tensor, ...]) -> None:
        encoded = self._buffer.encode(parts)
        if self._buffer.is_ring and self._rows.count > 1:
            self._pending = encoded
        else:
            self._store(encoded)

    def finish(self) -> None:
        if self._pending is not None:
            self._store(self._pending)

    @abstractmethod
    def _store(self, encoded: EncodedKV) -> None:
        """Store the tokens of this pass."""


class EvenPass(TokenPass):
    """All rows hold the same number of tokens: slices only, no masks, no copies to decode."""

    def read(self) -> KVContext:
        buffer, start, end = self._buffer, self._rows.start, self._rows.end
        if self._pending is None:
            entries = slice(0, min(end, buffer.size))
            if self._rows.count == 1:
                return KVContext(buffer.read_step(entries), is_causal=False)
            return KVContext(buffer.read(entries))
        parts = buffer.decode(self._pending)
        if start:
            parts = concatenate_parts(buffer.read_past(start), parts)
        if not buffer.sinks or start <= buffer.size:
            return KVContext(parts, band=(buffer.window, buffer.sinks))
        # tokens between the sinks and the others have left the ring
        positions = self.key_positions()[None], self._rows.positions[None]
        return KVContext(parts, make_position_mask(*positions, buffer.window, buffer.sinks))

    def key_positions(self) -> Tensor:
        buffer, rows = self._buffer, self._rows
        if self._pending is not None and rows.start > buffer.size:
            recent = torch.arange(rows.start - buffer.ring, rows.end, device=rows.device)
            return torch.cat([torch.arange(buffer.sinks, device=rows.device), recent])
        if rows.end > buffer.size and self._pending is None:
            return buffer.stored_positions(torch.tensor([rows.end], device=rows.device))[0]
        return torch.arange(rows.end, device=rows.device)

    def _store(self, encoded: EncodedKV) -> None:
        self._buffer.write_tokens(self._rows.start, encoded)


class RaggedPass(TokenPass):
    """Rows hold different numbers of tokens: each has positions, entries and a mask of its own."""

    def read(self) -> KVContext:
        buffer, keys, positions = self._buffer, self.key_positions(), self._rows.row_positions
        if self._pending is None:
            mask = see_something(make_position_mask(keys, positions))
            return KVContext(buffer.read(slice(0, keys.shape[1])), mask)
        past = buffer.read(slice(0, min(self._rows.start, buffer.size)))
        parts = concatenate_parts(past, buffer.decode(self._pending))
        return KVContext(parts, make_position_mask(keys, positions, buffer.window, buffer.sinks))

    def key_positions(self) -> Tensor:
        rows = self._rows
        if self._pending is not None:
            past = self._buffer.stored_positions(rows.lengths)
            return torch.cat([past[:, : rows.start], rows.row_positions], 1)
        held = self._buffer.stored_positions(rows.lengths + rows.is_real.sum(1))
        return held[:, : rows.start + rows.count]

    def _store(self, encoded: EncodedKV) -> None:
        self._buffer.write_newest(self._rows, encoded, self._buffer.ring)
