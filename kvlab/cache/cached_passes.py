"""Forward passes through a cache: rows of equal lengths, of any lengths, and static shapes.

Shapes: B rows, H heads of a part, C tokens of this pass, S entries of a buffer, D its width.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlab.cache.attention_pass import AttentionPass, KVContext
from kvlab.cache.formats import ScaledCodes
from kvlab.cache.kv_buffer import EncodedKV, KVBuffer, concatenate_parts, index_kv

if TYPE_CHECKING:
    from kvlab.cache.kv_cache import KVCache


StoreCodes = Callable[[Tensor, ScaledCodes, Tensor], None]
"""Takes a part (B, H, 1, D), the buffer's codes and the entry (B,) of each row's token."""


class CachedPass(AttentionPass):
    """What all passes through a cache share: slots and writers come from the layout.

    A chunk of more than one token must not enter a ring before the slot's last reader has
    attended: it would overwrite tokens that the chunk's first queries still see. Such writes wait
    in ``_pending``. All others are made at once, and layers read the buffer itself.

    Args:
        count: tokens C of this pass.
        added: how many of them are real, in every row or in each.
    """

    _past: list[int]  # tokens that each row has held before, where they may differ

    def __init__(self, cache: "KVCache", count: int, added: int | list[int]):
        self._cache, self._count, self._added = cache, count, added
        self._pending: dict[int, Any] = {}  # what is to be stored, by the slot's owner
        self._kept: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # by sinks and ring

    def writes_kv(self, layer: int) -> bool:
        return self._cache.layout.writers[layer]

    def write_kv(self, layer: int, *parts: Tensor) -> None:
        owner, buffer = self._find_buffer(layer)
        encoded = buffer.encode(parts)
        if buffer.is_ring and self._count > 1:
            self._pending[owner] = encoded
        else:
            self._store(buffer, encoded)

    def end_layer(self, layer: int) -> None:
        if not self._pending:
            return
        owner, buffer = self._find_buffer(layer)
        if owner in self._pending and owner not in self._cache.layout.owners[layer + 1 :]:
            self._store(buffer, self._pending.pop(owner))

    def _find_buffer(self, layer: int) -> tuple[int, Any]:
        """Return the owner of a layer's slot, and its buffer, of the kind that the pass reads."""
        owner = self._cache.layout.owners[layer]
        return owner, self._cache.buffers[owner]

    @abstractmethod
    def _store(self, buffer: Any, encoded: Any) -> None:
        """Store the K/V of this pass in ``buffer``."""

    def _store_newest(self, buffer: KVBuffer, encoded: EncodedKV, recent: int) -> None:
        """Store of each row the real tokens that are sinks or among the last ``recent``."""
        kind = buffer.sinks, buffer.ring
        if kind not in self._kept:
            # on the host, which knows all lengths and would otherwise wait for the device
            starts, added = (torch.tensor(n)[:, None] for n in (self._past, self._added))
            index = torch.arange(self._count)
            positions = starts + index
            is_kept = (index >= added - recent) | (positions < buffer.sinks)
            rows, tokens = (is_kept & (index < added)).nonzero(as_tuple=True)
            found = rows, tokens, buffer.find_entries(positions[rows, tokens])
            self._kept[kind] = tuple(t.to(self._cache.device, non_blocking=True) for t in found)
        rows, tokens, entries = self._kept[kind]
        buffer.write((rows, slice(None), entries), index_kv(encoded, (rows, slice(None), tokens)))

    def finish(self) -> None:
        self._cache.advance(self._added)


class UniformPass(CachedPass):
    """All rows hold the same number of tokens: slices only, no masks, no copies to decode."""

    def __init__(self, cache: "KVCache", count: int):
        super().__init__(cache, count, count)
        self._start = cache.length
        self.end = self.position_limit = cache.length + count
        self.positions = torch.arange(self._start, self.end, device=cache.device)

    def read_kv(self, layer: int) -> KVContext:
        owner, buffer = self._find_buffer(layer)
        if owner not in self._pending:
            entries = slice(0, min(self.end, buffer.size))
            if self._count == 1:
                return KVContext(buffer.read_step(entries), is_causal=False)
            return KVContext(buffer.read(entries))
        parts = buffer.decode(self._pending[owner])
        if self._start:
            parts = concatenate_parts(buffer.read_past(self._start), parts)
        if not buffer.sinks or self._start <= buffer.size:
            return KVContext(parts)
        # tokens between the sinks and the others have left the ring
        positions = self.key_positions(layer)[None], self.positions[None]
        return KVContext(parts, make_position_mask(*positions, buffer.window, buffer.sinks))

    def key_positions(self, layer: int) -> Tensor:
        owner, buffer = self._find_buffer(layer)
        device = self._cache.device
        if owner in self._pending and self._start > buffer.size:
            recent = torch.arange(self._start - buffer.ring, self.end, device=device)
            return torch.cat([torch.arange(buffer.sinks, device=device), recent])
        if self.end > buffer.size and owner not in self._pending:
            held: Tensor = buffer.stored_positions(torch.tensor([self.end], device=device))
            return held[0]
        return torch.arange(self.end, device=device)

    def _store(self, buffer: KVBuffer, encoded: EncodedKV) -> None:
        buffer.write_tokens(self._start, encoded)


class StaticPass(CachedPass):
    """One token a row, rows of any lengths, with fixed shapes and addresses, for CUDA graphs.

    Positions live on the device. The entry of position p of a row is visible once p is reached,
    in a ring as in a linear buffer: every entry of a ring that has wrapped holds a token of the
    window.

    Args:
        store_codes: stores a part's tokens as codes, a byte each; default in torch.

    Attributes:
        read_limit: entries from here on are not read; no row may use them yet.
    """

    def __init__(self, cache: "KVCache", store_codes: StoreCodes | None = None):
        assert cache.has_static_pass, "neither blocks of tokens nor eviction have fixed shapes"
        super().__init__(cache, 1, 1)
        self._store_codes = store_codes
        self._row_positions = cache.row_lengths
        self.positions = self._row_positions[:, None]  # a view, which advances with them
        self.end = self.position_limit = cache.max_length + 1  # one captured step serves all
        self.read_limit = cache.max_length
        self._held = cache.list_lengths()
        self._rows = torch.arange(cache.batch_size, device=cache.device)
        self._made: dict[Hashable, Tensor] = {}  # tensors of this step, which layers share

    def read_kv(self, layer: int) -> KVContext:
        _, buffer = self._find_buffer(layer)
        count, device = min(buffer.size, self.read_limit), self._cache.device
        visible = self._share(
            ("visible", count),
            lambda: torch.arange(count, device=device) <= self._row_positions[:, None, None, None],
        )
        counts = self._share("counts", lambda: self._row_positions + 1)
        return KVContext(buffer.read_step(slice(0, count)), visible, counts=counts)

    def _share(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return ``make()``, called once in a step for all layers."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def key_positions(self, layer: int) -> Tensor:
        _, buffer = self._find_buffer(layer)
        return self._share(
            ("keys", buffer.sinks, buffer.ring),
            lambda: buffer.stored_positions(self._row_positions + 1)[:, : self.read_limit],
        )

    def write_kv(self, layer: int, *parts: Tensor) -> None:
        _, buffer = self._find_buffer(layer)
        is_stored_so = buffer.format.has_codes and buffer.format.dtype != torch.uint8
        if self._store_codes is None or not is_stored_so or torch.compiler.is_compiling():
            super().write_kv(layer, *parts)
            return
        for values, stored in zip(parts, buffer.parts, strict=True):
            self._store_codes(values, ScaledCodes(*stored), self._find_entries(buffer))

    def _find_entries(self, buffer: KVBuffer) -> Tensor:
        name = "entries", buffer.sinks, buffer.ring
        return self._share(name, lambda: buffer.find_entries(self._row_positions))

    def _store(self, buffer: KVBuffer, encoded: EncodedKV) -> None:
        index = (self._rows, slice(None), self._find_entries(buffer))
        buffer.write(index, index_kv(encoded, (slice(None), slice(None), 0)))

    def prepare(self) -> None:
        """Move to the tokens that the cache holds now: a captured step does not see it change.

        Raises:
            CacheError: a row has no space for one more token.
        """
        self._cache.check_space(1)
        held = self._cache.list_lengths()
        if held != self._held:  # it was reset or filled since the last step
            self._row_positions.copy_(self._cache.row_lengths)
            self._held = held

    def finish(self) -> None:
        """Forget the tensors of this step. It does not advance, so that it may run again."""
        self._made.clear()

    def advance(self) -> None:
        """Advance by one token."""
        self._row_positions += 1
        self._cache.advance(1)
        self._held = self._cache.list_lengths()


class RaggedPass(CachedPass):
    """Rows hold different numbers of tokens: each has positions, entries and a mask of its own.

    Rows are left-aligned: row b's tokens are at positions 0, 1, ... of their own, and padding
    stands at the end of a chunk. Padding is neither stored nor seen by real tokens, and its
    outputs are meaningless.

    Args:
        end: tokens that the longest row holds after this pass.
    """

    def __init__(self, cache: "KVCache", count: int, added: list[int], end: int):
        super().__init__(cache, count, added)
        self.end = end
        self.position_limit = cache.length + count  # padding of the longest row is beyond `end`
        self._past, self._past_lengths = cache.list_lengths(), cache.row_lengths
        index = torch.arange(count, device=cache.device)
        lengths = torch.tensor(added).to(cache.device, non_blocking=True)
        self.positions = self._past_lengths[:, None] + index
        self._is_real = index < lengths[:, None]

    def read_kv(self, layer: int) -> KVContext:
        owner, buffer = self._find_buffer(layer)
        keys = self.key_positions(layer)
        if owner not in self._pending:
            mask = see_something(make_position_mask(keys, self.positions))
            return KVContext(buffer.read(slice(0, keys.shape[1])), mask)
        past = buffer.read(slice(0, min(self._cache.length, buffer.size)))
        parts = concatenate_parts(past, buffer.decode(self._pending[owner]))
        return KVContext(
            parts, make_position_mask(keys, self.positions, buffer.window, buffer.sinks)
        )

    def key_positions(self, layer: int) -> Tensor:
        owner, buffer = self._find_buffer(layer)
        if owner in self._pending:
            past = buffer.stored_positions(self._past_lengths)
            return torch.cat([past[:, : self._cache.length], self.positions], 1)
        held: Tensor = buffer.stored_positions(self._past_lengths + self._is_real.sum(1))
        return held[:, : self._cache.length + self._count]

    def _store(self, buffer: KVBuffer, encoded: EncodedKV) -> None:
        self._store_newest(buffer, encoded, buffer.ring)


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
