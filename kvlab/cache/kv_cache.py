"""The KV cache of one model under one serving configuration, preallocated from its layout."""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvlab.cache.kv_buffer import as_bytes
from kvlab.cache.slot_pass import CachedPass, PassRows, SlotBuffer
from kvlab.errors import CacheError
from kvlab.layout import KVLayout

Lengths = Tensor | Sequence[int]
"""(B,) how many tokens of each row are real; the rest is padding at the end."""


class KVCache:
    """Preallocated K/V of ``batch_size`` rows (B) of up to ``max_length`` tokens.

    Args:
        layout: which layer reads and writes which slot.
        dtype: the model's dtype. Decoded values have it, and stored ones too where the layout's
            ``kv_dtype`` is ``model``.
        compiles_steps: whether decoders of this cache compile their step.

    Attributes:
        buffers: the buffers of each slot, by the number of the layer that owns it.
        length: tokens held; where rows differ, those of the longest.
    """

    def __init__(
        self,
        layout: KVLayout,
        batch_size: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        compiles_steps: bool = False,
    ):
        self.compiles_steps = compiles_steps
        self.layout, self.batch_size, self.max_length = layout, batch_size, max_length
        self.dtype, self.device = dtype, device
        self.length = 0
        self._ragged_lengths: list[int] | None = None  # of each row, once they differ
        self.buffers: dict[int, SlotBuffer] = {
            slot: layout.plans[slot].open(batch_size, max_length, dtype, device)
            for slot in layout.slots
        }
        # after the buffers, which a batch that is too large does not get
        self._pass_starts: list[list[int]] = [[] for _ in range(batch_size)]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that is stored: the parts of all slots, with their scales."""
        return [tensor for buffer in self.buffers.values() for tensor in buffer.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of the unique storages behind `tensors`."""
        unique = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.tensors}
        return sum(storage.nbytes() for storage in unique.values())

    @property
    def row_lengths(self) -> Tensor:
        """Tokens held by each row, (B,)."""
        return torch.tensor(self.list_lengths()).to(self.device, non_blocking=True)

    def begin_pass(self, count: int, lengths: Lengths | None = None) -> CachedPass:
        """Return the next forward pass, over ``count`` tokens of each row.

        Args:
            count: tokens C of this pass.
            lengths: (B,) how many of them are real in each row; the rest is padding at the end.

        Raises:
            CacheError: the tokens do not fit, or ``lengths`` is not B numbers from 0 to C.
        """
        added = self.check_space(count, lengths)
        is_even = self._ragged_lengths is None and all(new == count for new in added)
        rows = PassRows(self.list_lengths(), added, count, self.device, is_even=is_even)
        advance = partial(self.advance, count if is_even else added)
        return CachedPass(self.layout, self.buffers, rows, advance)

    def check_space(self, count: int, lengths: Lengths | None = None) -> list[int]:
        """Return how many tokens a pass adds to each row.

        Raises:
            CacheError: see `begin_pass`.
        """
        if lengths is None:
            added = [count] * self.batch_size
        else:
            added = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        if len(added) != self.batch_size or not all(0 <= new <= count for new in added):
            text = f"lengths = {added} does not give 0 to {count} tokens"
            raise CacheError(f"{text} for each of {self.batch_size} rows")
        longest = max(new + held for new, held in zip(added, self.list_lengths(), strict=True))
        if longest > self.max_length:
            text = f"{longest} tokens do not fit a cache of max_length = {self.max_length}"
            raise CacheError(f"{text}; make a longer cache, or reset this one")
        return added

    @property
    def has_static_pass(self) -> bool:
        """Whether a decode step has fixed shapes."""
        return all(buffer.has_fixed_shapes for buffer in self.buffers.values())

    def count_read_slots(self, entries: int) -> int | None:
        """Return how many slots a decode step reads of each row, over all layers.

        Args:
            entries: how many it reads of each buffer; a shorter buffer is read whole.

        Returns:
            None if the step has no fixed shapes.
        """
        if not self.has_static_pass:
            return None
        read = (self.buffers[owner].tensors[0] for owner in self.layout.owners)
        return sum(min(tensor.shape[2], entries) for tensor in read)

    def list_lengths(self) -> list[int]:
        """Return the tokens held by each row."""
        return list(self._ragged_lengths or [self.length] * self.batch_size)

    def list_pass_starts(self) -> list[int]:
        """Return the positions at which the passes over the first row's tokens began.

        The list is empty unless what tokens store depends on it (`KVLayout.depends_on_passes`).
        """
        return list(self._pass_starts[0])

    def fill(self, length: int, pass_starts: Sequence[int]) -> None:
        """Mark an empty cache of one row as holding ``length`` tokens, copied into it.

        Args:
            pass_starts: as `list_pass_starts` returns them.
        """
        self.length, self._pass_starts[0] = length, list(pass_starts)

    def advance(self, added: int | Sequence[int]) -> None:
        """Advance every row by ``added`` tokens, or each by its own number of them."""
        counts = [added] * self.batch_size if isinstance(added, int) else added
        if self.layout.depends_on_passes:
            starts = zip(self._pass_starts, self.list_lengths(), counts, strict=True)
            for passes, length, count in starts:
                if count:
                    passes.append(length)
        if isinstance(added, int) and self._ragged_lengths is None:
            self.length += added
            return
        lengths = zip(counts, self.list_lengths(), strict=True)
        self._ragged_lengths = [new + held for new, held in lengths]
        self.length = max(self._ragged_lengths)

    def reset(self) -> None:
        """Forget every token; keep the memory."""
        self.length, self._ragged_lengths = 0, None
        self._pass_starts = [[] for _ in range(self.batch_size)]

    def slice_rows(self, start: int, stop: int) -> "KVCache":
        """Return a cache of some rows that stores into this one; `advance` this one afterwards."""
        rows = range(self.batch_size)[start:stop]
        return self._copy(rows, lambda stored: stored[start:stop])

    def select_rows(self, index: Tensor) -> "KVCache":
        """Return a new cache with copies of the rows ``index``; a row may be repeated."""
        return self._copy(
            index.tolist(),
            lambda stored: as_bytes(stored).index_select(0, index).view(stored.dtype),
        )

    def _copy(self, rows: Sequence[int], select: Callable[[Tensor], Tensor]) -> "KVCache":
        """Return a cache of ``rows``, which ``select`` takes from every tensor that is stored."""
        cache = copy.copy(self)
        cache.batch_size = len(rows)
        cache._pass_starts = [list(self._pass_starts[row]) for row in rows]
        if self._ragged_lengths is not None:
            cache._ragged_lengths = [self._ragged_lengths[row] for row in rows]
            cache.length = max(cache._ragged_lengths)
        cache.buffers = {owner: buffer.map_rows(select) for owner, buffer in self.buffers.items()}
        return cache
