"""The forward passes that go through a cache: rows of equal length, and rows that differ."""

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.cache.attention_pass import AttentionPass, KeysValues
from kvlab.cache.kv_buffer import EncodedKV, KVBuffer

if TYPE_CHECKING:
    from kvlab.cache.kv_cache import KVCache


class CachedPass(AttentionPass):
    """What both kinds share: slots and writers come from the layout.

    A chunk longer than one token must not be written into a ring before the slot's last reader
    has attended: it would overwrite tokens that its first queries still see. So those writes
    wait in ``_waiting``; all others are made at once, and what is read is the buffer itself.
    """

    def __init__(self, cache: "KVCache", count: int):
        self._cache, self._count = cache, count
        self._waiting: dict[int, EncodedKV] = {}

    def writes(self, layer: int) -> bool:
        return self._cache.layout.writers[layer]

    def _slot(self, layer: int) -> tuple[int, KVBuffer]:
        owner = self._cache.layout.owners[layer]
        return owner, self._cache.slots[owner]

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        owner, slot = self._slot(layer)
        kept = slot.encode(k, v)
        if slot.is_ring and self._count > 1:
            self._waiting[owner] = kept
        else:
            self._write(slot, kept)

    def done(self, layer: int) -> None:
        owner, slot = self._slot(layer)
        if owner in self._waiting and self._cache.layout.last_readers[owner] == layer:
            self._write(slot, self._waiting.pop(owner))

    @abstractmethod
    def _write(self, slot: KVBuffer, kept: EncodedKV) -> None:
        """Keeps the K/V of this pass."""


class UniformPass(CachedPass):
    """All rows hold the same number of tokens: slices, no masks, no copies to decode."""

    def __init__(self, cache: "KVCache", count: int):
        super().__init__(cache, count)
        self._start = cache.length

    @property
    def positions(self) -> Tensor:
        return torch.arange(self._start, self._start + self._count, device=self._cache.device)

    @property
    def end(self) -> int:
        return self._start + self._count

    def get(self, layer: int) -> KeysValues:
        owner, slot = self._slot(layer)
        end = self._start + self._count
        if owner in self._waiting:
            return self._with_past(slot, self._waiting[owner])
        context = slot.read(slice(0, min(end, slot.size)))
        return context if self._count == 1 else KeysValues(context.k, context.v)

    def _with_past(self, slot: KVBuffer, kept: EncodedKV) -> KeysValues:
        k, v = slot.decode(kept)
        past = min(self._start, slot.size)
        if past:
            past_k, past_v = slot.read_run(self._start, past)
            k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        return KeysValues(k, v)

    def _write(self, slot: KVBuffer, kept: EncodedKV) -> None:
        slot.write_run(self._start, kept)

    def finish(self) -> None:
        self._cache.advance(self._count)


class StaticPass(CachedPass):
    """One token a row, rows of any lengths: positions on the device, nothing allocated to keep.

    Slot p mod S of a row is visible once position p is reached, for a ring as for a linear
    buffer: all slots of a ring that has wrapped hold tokens of the window.
    """

    def __init__(self, cache: "KVCache"):
        super().__init__(cache, 1)
        self._at = cache.row_lengths
        self._rows = torch.arange(cache.batch_size, device=cache.device)

    @property
    def positions(self) -> Tensor:
        return self._at[:, None]

    @property
    def end(self) -> int:
        return self._cache.length + 1

    def get(self, layer: int) -> KeysValues:
        _, slot = self._slot(layer)
        context = slot.read(slice(None))
        slots = torch.arange(slot.size, device=self._cache.device)
        seen = slots <= self._at[:, None]
        return KeysValues(context.k, context.v, seen[:, None, None])

    def _write(self, slot: KVBuffer, kept: EncodedKV) -> None:
        k, v = ([tensor[:, :, 0] for tensor in side] for side in kept)
        slot.write((self._rows, slice(None), self._at % slot.size), (k, v))

    def check_room(self) -> None:
        """Raises CacheError unless one more token fits every row."""
        self._cache.step(1)

    def advance(self) -> None:
        """Moves on by one token; `finish` does not, so that a pass may be run again."""
        self._at += 1
        self._cache.advance(1)


class RaggedPass(CachedPass):
    """Rows hold different numbers of tokens: positions, slots and masks for each row.

    Rows are left-aligned: row b's tokens stand at positions 0, 1, ... of their own, and padding
    in a chunk stands at its end. Padding is neither written nor seen by real tokens; its own
    outputs mean nothing.
    """

    def __init__(self, cache: "KVCache", count: int, added: list[int], end: int):
        super().__init__(cache, count)
        self._end = end
        self._before = cache.row_lengths
        self._added = added
        steps = torch.arange(count, device=cache.device)
        lengths = torch.tensor(added, device=cache.device)
        self._positions = self._before[:, None] + steps
        self._real = steps < lengths[:, None]

    @property
    def positions(self) -> Tensor:
        return self._positions

    @property
    def end(self) -> int:
        return self._end

    def get(self, layer: int) -> KeysValues:
        owner, slot = self._slot(layer)
        if owner in self._waiting:
            return self._with_past(slot, self._waiting[owner])
        used = min(self._cache.length + self._count, slot.size)
        context = slot.read(slice(0, used))
        after = self._before + self._real.sum(1)
        held = slot.positions_held(after)[:, :used]
        mask = self._mask(held, None)
        mask[..., 0] |= ~mask.any(-1)  # padding of a still empty row sees one key, not none: no NaN
        return KeysValues(context.k, context.v, mask)

    def _with_past(self, slot: KVBuffer, kept: EncodedKV) -> KeysValues:
        k, v = slot.decode(kept)
        past = slot.read(slice(0, min(self._cache.length, slot.size)))
        held = slot.positions_held(self._before)[:, : past.k.shape[2]]
        mask = torch.cat([self._mask(held, slot.size), self._mask(self._positions, slot.size)], -1)
        return KeysValues(torch.cat([past.k, k], 2), torch.cat([past.v, v], 2), mask)

    def _mask(self, held: Tensor, window: int | None) -> Tensor:
        """(B, 1, C, keys): key positions ``held`` (B, keys) seen by this pass's queries."""
        keys, queries = held[:, None, :], self._positions[:, :, None]
        seen = (keys >= 0) & (keys <= queries)
        if window is not None:
            seen &= queries - keys < window
        return seen[:, None]

    def _write(self, slot: KVBuffer, kept: EncodedKV) -> None:
        lengths = self._real.sum(1, keepdim=True)
        columns = torch.arange(self._count, device=self._cache.device)
        keep = self._real & (columns >= lengths - slot.size)
        rows, picked = keep.nonzero(as_tuple=True)
        at = self._positions[rows, picked] % slot.size
        k, v = ([tensor[rows, :, picked] for tensor in side] for side in kept)
        slot.write((rows, slice(None), at), (k, v))

    def finish(self) -> None:
        self._cache.advance_rows(self._added)
