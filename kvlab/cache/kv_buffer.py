"""One slot of the cache: a K and a V storage, linear or a ring.

Token p stands in slot ``p mod S`` of its row. A linear slot has as many slots as the cache may
hold tokens, so nothing is ever overwritten; a ring has ``min(window, that)``.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvlab.cache.attention_pass import KeysValues
from kvlab.cache.formats import Index, KVFormat

EncodedKV = tuple[Sequence[Tensor], Sequence[Tensor]]
"""K and V of some tokens, in the form that the storages keep."""


class KVBuffer:
    """K and V (B, H, S, D) of one owner; ``is_ring`` if S may be fewer than the tokens."""

    def __init__(self, k: KVFormat, v: KVFormat, *, is_ring: bool):
        self.k, self.v, self.is_ring = k, v, is_ring
        self.size = k.tensors[0].shape[2]

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield from self.k.tensors
        yield from self.v.tensors

    def encode(self, k: Tensor, v: Tensor) -> EncodedKV:
        return self.k.encode(k), self.v.encode(v)

    def decode(self, kept: EncodedKV) -> tuple[Tensor, Tensor]:
        return self.k.decode(kept[0]), self.v.decode(kept[1])

    def read(self, slots: slice) -> KeysValues:
        """Slots as they lie; for a ring that is not the order of the tokens."""
        return KeysValues(self.k.read(slots), self.v.read(slots), ordered=False)

    def write(self, index: Index, kept: EncodedKV) -> None:
        self.k.write(index, kept[0])
        self.v.write(index, kept[1])

    def write_run(self, start: int, kept: EncodedKV) -> None:
        """Writes consecutive tokens from position ``start``; of a long run the last S stay."""
        count = kept[0][0].shape[2]
        skip = max(0, count - self.size)
        at = (start + skip) % self.size
        head = min(count - skip, self.size - at)
        self._write_part(slice(at, at + head), kept, slice(skip, skip + head))
        if skip + head < count:
            self._write_part(slice(0, count - skip - head), kept, slice(skip + head, count))

    def _write_part(self, slots: slice, kept: EncodedKV, part: slice) -> None:
        k, v = ([tensor[:, :, part] for tensor in side] for side in kept)
        self.write((slice(None), slice(None), slots), (k, v))

    def read_run(self, end: int, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` tokens before position ``end``, in order: (B, H, count, D) each."""
        at = (end - count) % self.size
        head = min(count, self.size - at)
        first = self.read(slice(at, at + head))
        if head == count:
            return first.k, first.v
        rest = self.read(slice(0, count - head))
        return torch.cat([first.k, rest.k], 2), torch.cat([first.v, rest.v], 2)

    def positions_held(self, lengths: Tensor) -> Tensor:
        """For rows of ``lengths`` (B,) tokens: the position in each slot, (B, S); -1 if empty."""
        last = lengths[:, None] - 1
        slots = torch.arange(self.size, device=lengths.device)
        held = last - (last - slots) % self.size
        return held.clamp_min(-1)
