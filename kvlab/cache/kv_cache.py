"""The KV cache of one model under one serving configuration, preallocated from its layout."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.cache.attention_pass import AttentionPass
from kvlab.cache.cached_passes import RaggedPass, StaticPass, UniformPass
from kvlab.cache.formats import allocate_format
from kvlab.cache.kv_buffer import KVBuffer
from kvlab.errors import CacheError
from kvlab.layout import KVLayout


class KVCache:
    """Preallocated K/V of ``batch_size`` rows of up to ``max_length`` tokens.

    Args:
        layout: who reads and writes which slot.
        batch_size: rows B.
        max_length: the most tokens that a row may hold.
        dtype: the model's dtype: what is given back, and what is kept where the layout's
            ``kv_dtype`` is ``model``.
        device: where the buffers live.

    Attributes:
        slots: for every owner its buffers.
        length: tokens held; of rows that differ, the most.
    """

    def __init__(
        self,
        layout: KVLayout,
        batch_size: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.layout, self.batch_size, self.max_length = layout, batch_size, max_length
        self.dtype, self.device = dtype, device
        self.length = 0
        self._rows: list[int] | None = None  # tokens of each row, once they differ
        kind = layout.storage_dtype(str(dtype).removeprefix("torch."))
        self.slots: dict[int, KVBuffer] = {}
        for owner in layout.slots:
            size = layout.slot_length(owner, max_length)
            shape = (batch_size, layout.n_kv_head, size, layout.head_dim)
            k, v = (allocate_format(kind, shape, dtype, device) for _ in range(2))
            self.slots[owner] = KVBuffer(k, v, is_ring=layout.kinds[owner] == "L")

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that is kept: codes and scales of K and V of every slot."""
        return [tensor for slot in self.slots.values() for tensor in slot.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of the unique storages behind `tensors`."""
        unique = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.tensors}
        return sum(storage.nbytes() for storage in unique.values())

    @property
    def row_lengths(self) -> Tensor:
        """Tokens held by each row, (B,)."""
        rows = self._rows if self._rows is not None else [self.length] * self.batch_size
        return torch.tensor(rows, device=self.device)

    def step(self, count: int, lengths: Tensor | Sequence[int] | None = None) -> AttentionPass:
        """The next forward pass, over ``count`` tokens a row.

        Args:
            count: tokens C of this pass.
            lengths: (B,) how many of them are real in each row, where the rest is padding.

        Raises:
            CacheError: the tokens do not fit, or ``lengths`` is not (B,) of 0 to C.
        """
        added = self._added(count, lengths)
        before = self._rows if self._rows is not None else [self.length] * self.batch_size
        longest = max(a + b for a, b in zip(added, before, strict=True))
        if longest > self.max_length:
            text = f"{longest} tokens do not fit a cache of max_length = {self.max_length}"
            raise CacheError(f"{text}; make a longer cache, or crop this one")
        if self._rows is None and all(a == count for a in added):
            return UniformPass(self, count)
        return RaggedPass(self, count, added, longest)

    def static_step(self) -> StaticPass:
        """A pass of one token a row with fixed shapes and addresses, for CUDA graphs."""
        return StaticPass(self)

    def _added(self, count: int, lengths: Tensor | Sequence[int] | None) -> list[int]:
        if lengths is None:
            return [count] * self.batch_size
        added = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        if len(added) != self.batch_size or not all(0 <= n <= count for n in added):
            text = f"lengths = {added} must name 0 to {count} tokens"
            raise CacheError(f"{text} for each of {self.batch_size} rows")
        return added

    def advance(self, count: int) -> None:
        """Says that every row got ``count`` tokens more. Called by the step."""
        self.length += count
        if self._rows is not None:
            self._rows = [length + count for length in self._rows]

    def advance_rows(self, added: Sequence[int]) -> None:
        """Says how many tokens each row got. Called by the step."""
        before = self._rows if self._rows is not None else [self.length] * self.batch_size
        self._rows = [a + b for a, b in zip(added, before, strict=True)]
        self.length = max(self._rows)

    def reset(self) -> None:
        """Forgets every token; keeps the memory."""
        self.length, self._rows = 0, None

    def crop(self, length: int) -> None:
        """Forgets all but the first ``length`` tokens of every row, to reuse a prefix.

        Raises:
            CacheError: a row is shorter, or a ring has dropped tokens that the next token
                would see.
        """
        rows = self._rows if self._rows is not None else [self.length]
        if not 0 <= length <= min(rows):
            raise CacheError(f"length = {length}: rows hold {min(rows)} tokens; use 0 to that")
        for owner, slot in self.slots.items():
            dropped = max(rows) - slot.size  # tokens before this one are gone
            if slot.is_ring and max(0, length - (self.layout.window or 0) + 1) < dropped:
                text = f"length = {length}: the ring of layer {owner} keeps the last {slot.size}"
                raise CacheError(f"{text} of {max(rows)} tokens; run the prefix again instead")
        self.length, self._rows = length, None

    def repeat_rows(self, times: int) -> "KVCache":
        """A new cache in which every row stands ``times`` times in a row."""
        index = torch.arange(self.batch_size, device=self.device).repeat_interleave(times)
        return self.select_rows(index)

    def select_rows(self, index: Tensor) -> "KVCache":
        """A new cache of the rows ``index`` (any number, repeats allowed), copied."""
        chosen = object.__new__(KVCache)
        chosen.__dict__.update(self.__dict__)
        chosen.batch_size = len(index)
        if self._rows is not None:
            chosen._rows = [self._rows[i] for i in index.tolist()]
            chosen.length = max(chosen._rows)
        chosen.slots = {
            owner: KVBuffer(
                slot.k.like([t.index_select(0, index) for t in slot.k.tensors]),
                slot.v.like([t.index_select(0, index) for t in slot.v.tensors]),
                is_ring=slot.is_ring,
            )
            for owner, slot in self.slots.items()
        }
        return chosen
