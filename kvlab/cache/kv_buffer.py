"""The K and V buffers of one cache slot, linear or a ring.

The token at position p of a row is stored in entry ``p mod S``. A linear buffer has as many
entries as the cache may hold tokens, so nothing is ever overwritten. A ring has
``min(window, max_length)`` entries, and a new token overwrites the one that left the window.

Shapes: B rows, H K/V heads, S entries, D head_dim.
"""

from typing import Any

import torch
from torch import Tensor

from kvlab.cache.formats import KVFormat, Shape

EncodedKV = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""K and V of some tokens, encoded by the buffer's format."""

Index = tuple[Any, ...]
"""An index into (B, H, S): slices, or tensors of rows and entries."""


def index_kv(encoded: EncodedKV, index: Index) -> EncodedKV:
    """Return ``encoded`` with every tensor of K and V indexed."""
    k, v = encoded
    return tuple(tensor[index] for tensor in k), tuple(tensor[index] for tensor in v)


class KVBuffer:
    """K and V (B, H, S, D) of one slot.

    Args:
        k, v: the tensors that ``kv_format`` allocated.
        kv_format: how they are encoded.
        dtype: of the decoded values.
        is_ring: S may be smaller than the number of tokens.
    """

    def __init__(
        self,
        k: tuple[Tensor, ...],
        v: tuple[Tensor, ...],
        kv_format: KVFormat,
        dtype: torch.dtype,
        *,
        is_ring: bool,
    ):
        self.k, self.v, self.kv_format, self.dtype, self.is_ring = k, v, kv_format, dtype, is_ring
        self.size = k[0].shape[2]

    @classmethod
    def allocate(
        cls,
        shape: Shape,
        kv_format: KVFormat,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_ring: bool,
    ) -> "KVBuffer":
        """Return an empty buffer of ``shape`` (B, H, S, D)."""
        k, v = (kv_format.allocate(shape, device) for _ in range(2))
        return cls(k, v, kv_format, dtype, is_ring=is_ring)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that is stored, K's before V's."""
        return self.k + self.v

    def encode(self, k: Tensor, v: Tensor) -> EncodedKV:
        """Encode k and v (B, H, T, D)."""
        return self.kv_format.encode(k), self.kv_format.encode(v)

    def decode(self, encoded: EncodedKV) -> tuple[Tensor, Tensor]:
        """Decode K and V to the model's dtype."""
        k, v = encoded
        return self.kv_format.decode(k, self.dtype), self.kv_format.decode(v, self.dtype)

    def read(self, entries: slice) -> tuple[Tensor, Tensor]:
        """Return K and V (B, H, entries, D) in storage order; a ring's is not the tokens' order."""
        return self.decode(index_kv((self.k, self.v), (slice(None), slice(None), entries)))

    def write(self, index: Index, encoded: EncodedKV) -> None:
        """Store encoded K and V at ``index``."""
        for stored, new in zip(self.tensors, encoded[0] + encoded[1], strict=True):
            stored[index] = new

    def read_tokens(self, end: int, count: int) -> tuple[Tensor, Tensor]:
        """Return K and V of the ``count`` tokens before position ``end``, in token order."""
        start = (end - count) % self.size
        until_wrap = min(count, self.size - start)
        k, v = self.read(slice(start, start + until_wrap))
        if until_wrap == count:
            return k, v
        wrapped_k, wrapped_v = self.read(slice(0, count - until_wrap))
        return torch.cat([k, wrapped_k], 2), torch.cat([v, wrapped_v], 2)

    def write_tokens(self, start: int, encoded: EncodedKV) -> None:
        """Store consecutive tokens from position ``start`` on; of more than S, the last S."""
        count = encoded[0][0].shape[2]
        skipped = max(0, count - self.size)
        entry = (start + skipped) % self.size
        wrap = min(count, skipped + self.size - entry)  # the first token stored in entry 0
        self._write_range(entry, encoded, slice(skipped, wrap))
        if wrap < count:
            self._write_range(0, encoded, slice(wrap, count))

    def _write_range(self, entry: int, encoded: EncodedKV, tokens: slice) -> None:
        entries = slice(entry, entry + tokens.stop - tokens.start)
        selected = index_kv(encoded, (slice(None), slice(None), tokens))
        self.write((slice(None), slice(None), entries), selected)

    def stored_positions(self, lengths: Tensor) -> Tensor:
        """Return the token position that each entry holds, (B, S), or -1 where it is empty.

        Args:
            lengths: (B,) tokens held by each row.
        """
        last = lengths[:, None] - 1
        entries = torch.arange(self.size, device=lengths.device)
        positions = last - (last - entries) % self.size
        return positions.clamp_min(-1)

    def select_rows(self, index: Tensor) -> "KVBuffer":
        """Return a copy of the rows ``index``."""
        k, v = (tuple(t.index_select(0, index) for t in tensors) for tensors in (self.k, self.v))
        return KVBuffer(k, v, self.kv_format, self.dtype, is_ring=self.is_ring)
