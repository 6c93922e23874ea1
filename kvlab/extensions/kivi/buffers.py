"""KIVI's cache (arXiv 2402.02750): old tokens in blocks of 2 or 4 bits, the newest in full.

Keys have a scale and a zero point for each channel and block of G tokens: a few channels of keys
are much larger than the others, in all tokens. Values have them for each token and group of
channels. A token is quantized together with its block, once R newer tokens follow the block's
last one. So the newest R to R + G - 1 tokens are stored in the model's dtype (`BlockRule`).

Every query reads each token as it was stored at the query's own time, also in a pass over many
tokens. A text therefore gives the same codes and the same logits however it is split into passes.
KIVI's own code attends to a whole prompt before it quantizes it.

Shapes: B rows, H heads of a part, N blocks, G tokens of a block, D width of a part, S tokens in
full precision, C tokens of this pass, R rows that differ: 1 if all hold the same number of tokens,
else B.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kvlab.cache.attention_pass import KVContext
from kvlab.cache.formats import (
    MAX_SCALE,
    MIN_SCALE,
    Rotated,
    divide,
    make_matrices,
    pack_codes,
    rotate,
    split_groups,
    unpack_codes,
)
from kvlab.cache.kv_buffer import EncodedKV, Index, concatenate_parts
from kvlab.cache.kv_buffer import list_ring_entries as list_entries
from kvlab.cache.slot_pass import EntryRange, PassRows, SlotBuffer, SlotPass, see_something
from kvlab.spec.dtypes import find_dtype

if TYPE_CHECKING:
    from kvlab.extensions.kivi.slots import BlockSlot


class BlockFormat:
    """Asymmetric codes of blocks (..., G, D), packed in bytes, with float16 scales and minima.

    Args:
        codes_per_byte: 4 for codes of 2 bits, 2 for 4 bits.
        group: numbers of one token that share a scale; None where the numbers of one channel do,
            over the tokens of the block.
    """

    def __init__(self, codes_per_byte: int, group: int | None):
        self.codes_per_byte, self.group = codes_per_byte, group
        self.max_code = 2.0 ** (8 // codes_per_byte) - 1

    def allocate(self, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Return the zero-filled tensors of blocks of ``shape`` (B, H, N, G, D)."""
        codes = (*shape[:-1], shape[-1] // self.codes_per_byte)
        scales: tuple[int, ...] = (*shape[:-2], 1, shape[-1])
        if self.group is not None:
            scales = (*shape[:-1], shape[-1] // min(self.group, shape[-1]))
        kinds = ((codes, torch.uint8), (scales, torch.float16), (scales, torch.float16))
        return tuple(torch.zeros(size, dtype=dtype, device=device) for size, dtype in kinds)

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return codes, scales and minima of ``values`` (..., G, D)."""
        split, dim = self._split(values.float())
        low = split.amin(dim, keepdim=True).clamp(-MAX_SCALE, MAX_SCALE).half()
        spread = split.amax(dim, keepdim=True) - low.float()
        scale = divide(spread, self.max_code).clamp(MIN_SCALE, MAX_SCALE).half()
        codes = ((split - low.float()) / scale.float()).round().clamp(0, self.max_code)
        packed = pack_codes(codes.to(torch.uint8).view(values.shape), self.codes_per_byte)
        return packed, self._join(scale), self._join(low)

    def decode(self, encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return values (..., G, D) of ``dtype``."""
        packed, scale, low = encoded
        codes = unpack_codes(packed, self.codes_per_byte).to(dtype)
        if self.group is None:
            return codes * scale.to(dtype) + low.to(dtype)
        split, _ = self._split(codes)
        return (split * scale.to(dtype)[..., None] + low.to(dtype)[..., None]).view(codes.shape)

    def _split(self, values: Tensor) -> tuple[Tensor, int]:
        """Return values so that those along one dimension share a scale, and that dimension."""
        if self.group is None:
            return values, -2
        return split_groups(values, min(self.group, values.shape[-1])), -1

    def _join(self, scales: Tensor) -> Tensor:
        return scales if self.group is None else scales[..., 0]


class KIVIBuffer(SlotBuffer):
    """The parts of one slot: blocks of codes, and the newest tokens in full precision.

    The token at position p is in entry ``p mod S`` while it is in full precision, and then in
    entry ``p // G mod N`` of the blocks. A local slot keeps the blocks that reach into the window.

    Args:
        plan: when tokens are quantized.
        context: the most tokens of a row.
        dtype: the model's.

    Attributes:
        matrices: by which each part is multiplied before it is stored; or none.
        full: each part's newest tokens (B, H, S, D).
        blocks: each part's codes, scales and minima.
    """

    def __init__(
        self,
        plan: "BlockSlot",
        batch_size: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.rule, self.window, stored = plan.rule, plan.layer.window, plan.layer.stored
        self.block_count, self.size = self.rule.capacity(context, self.window)
        self.matrices = make_matrices(plan, device)
        per_byte = [find_dtype(name).numbers_per_item for name in plan.list_dtypes("")]
        group = self.rule.group
        self.formats = [BlockFormat(n, group if i else None) for i, n in enumerate(per_byte)]
        self.full = tuple(
            torch.zeros(batch_size, part.count, self.size, part.size, dtype=dtype, device=device)
            for part in stored
        )
        self.blocks: EncodedKV = tuple(
            block_format.allocate(
                (batch_size, part.count, self.block_count, group, part.size), device
            )
            for part, block_format in zip(stored, self.formats, strict=True)
        )

    def begin_pass(self, rows: PassRows) -> SlotPass:
        return KIVIPass(self, rows)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.full, *self._block_tensors)

    def encode(self, parts: Sequence[Tensor]) -> EncodedKV:
        """Encode the blocks (B, H, N, G, D) of each part."""
        return tuple(f.encode(part) for f, part in zip(self.formats, parts, strict=True))

    def decode(self, encoded: EncodedKV) -> tuple[Tensor, ...]:
        """Return each part's blocks as tokens (B, H, N x G, D) of the model's dtype."""
        dtype = self.full[0].dtype
        decoded = (f.decode(part, dtype) for f, part in zip(self.formats, encoded, strict=True))
        return tuple(blocks.flatten(2, 3) for blocks in decoded)

    def list_segment(self, start: int, end: int) -> list[EntryRange]:
        if self.window is not None:
            return []
        first_full, window = self.rule.first_full, self.window
        blocks = slice(*(first_full(n, window) // self.rule.group for n in (start, end)))
        return [(self._block_tensors, [blocks])]

    def list_snapshot(self, length: int) -> list[EntryRange]:
        blocks, full = self.rule.snapshot(length, self.window)
        entries = list_entries(full.start, full.stop, self.size)
        ranges = [(self.full, entries)] if entries else []
        if blocks:
            entries = list_entries(blocks.start, blocks.stop, self.block_count)
            ranges.append((self._block_tensors, entries))
        return ranges

    @property
    def _block_tensors(self) -> tuple[Tensor, ...]:
        return tuple(chain(*self.blocks))

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> Self:
        rows = copy.copy(self)
        rows.full = tuple(map(select, self.full))
        rows.blocks = tuple(tuple(map(select, part)) for part in self.blocks)
        return rows


@dataclass(frozen=True)
class _ReadPlan:
    """What one pass reads of slots of one window, and what it adds.

    Attributes:
        blocks: (R, n) entries of the stored blocks that are read.
        past: (R, n) entries of the stored tokens in full precision that are read.
        completed: n, the most blocks that this pass completes in a row.
        completed_tokens: (R, n x G) where their tokens are, among ``past`` and this pass's.
        mask: (R, 1, C, keys) of the tokens of ``blocks``, those completed, ``past``, and this pass.
        copied_tokens, copied_blocks: where in the buffer, and from where in this pass's K/V, what
            this pass adds is copied.
        positions: (R, keys) of the tokens of ``mask``, on the CPU.
    """

    blocks: Tensor
    past: Tensor
    completed: int
    completed_tokens: Tensor
    mask: Tensor
    copied_tokens: tuple[Index, Index]
    copied_blocks: tuple[Index, Index]
    positions: Tensor


class KIVIPass(SlotPass):
    """A slot in blocks, in one pass.

    What is pending are each part's tokens, those of the past first, and the completed blocks.
    """

    def __init__(self, buffer: KIVIBuffer, rows: PassRows):
        self._buffer, self._rows = buffer, rows
        self._plan: _ReadPlan = rows.share(("blocks", buffer.window), self._make_plan)
        self._tokens: tuple[Tensor, ...] = ()
        self._completed: EncodedKV = ()

    def write(self, parts: tuple[Tensor, ...]) -> None:
        plan, buffer = self._plan, self._buffer
        dtype = buffer.full[0].dtype
        if buffer.matrices:
            parts = tuple(map(rotate, parts, buffer.matrices))
        past = tuple(_take(part, plan.past) for part in buffer.full)
        self._tokens = concatenate_parts(past, tuple(part.to(dtype) for part in parts))
        blocks = (plan.completed, buffer.rule.group)
        completed = [_take(part, plan.completed_tokens) for part in self._tokens]
        completed = [part.reshape(*part.shape[:2], *blocks, part.shape[-1]) for part in completed]
        self._completed = buffer.encode(completed)

    def read(self) -> KVContext:
        plan, buffer = self._plan, self._buffer
        stored = tuple(tuple(_take(t, plan.blocks) for t in part) for part in buffer.blocks)
        quantized = concatenate_parts(buffer.decode(stored), buffer.decode(self._completed))
        parts = concatenate_parts(quantized, self._tokens)
        rotated = tuple(map(Rotated, parts, buffer.matrices))
        return KVContext(rotated or parts, plan.mask)

    def key_positions(self) -> Tensor:
        return self._move(self._plan.positions)

    def finish(self) -> None:
        plan, buffer = self._plan, self._buffer
        target, source = plan.copied_tokens
        for stored, added in zip(buffer.full, self._tokens, strict=True):
            stored[target] = added[source]
        if plan.completed:
            target, source = plan.copied_blocks
            for stored, encoded in zip(chain(*buffer.blocks), chain(*self._completed), strict=True):
                stored[target] = encoded[source]

    def _move(self, planned: Tensor) -> Tensor:
        """Copy a plan's tensor to the cache's device, without waiting for it."""
        return planned.to(self._rows.device, non_blocking=True)

    def _make_plan(self) -> _ReadPlan:
        # On the CPU, which knows all lengths: sizes depend on the values, and a device would have
        # to be asked for each.
        rows, buffer = self._rows, self._buffer
        which = slice(0, 1) if rows.is_even else slice(None)
        starts = torch.tensor(rows.past[which])[:, None]
        ends = starts + torch.tensor(rows.added[which])[:, None]
        own = starts + torch.arange(rows.count)
        group = buffer.rule.group
        before, after = (self._first_full(lengths) for lengths in (starts, ends))
        first = torch.zeros_like(before)
        if buffer.window is not None:
            first = ((starts + 1 - buffer.window).clamp_min(0) // group).minimum(before // group)
        blocks, is_block = _ranges(first, before // group)
        completed, is_completed = _ranges(before // group, after // group)
        past, is_past = _ranges(before.maximum(starts - buffer.size), starts)
        tokens = _tokens_of(completed, group)
        offset = past[:, :1] if past.shape[1] else starts
        # an index beyond a row's own tokens belongs to a block that the row does not complete
        index = torch.where(tokens < starts, tokens - offset,
                            tokens - starts + past.shape[1])  # fmt: skip
        index = index.clamp(0, past.shape[1] + rows.count - 1)
        quantized = torch.cat([_tokens_of(blocks, group), tokens], 1)
        is_quantized = torch.cat([is_block, is_completed], 1).repeat_interleave(group, 1)
        full = torch.cat([past, own], 1)
        is_full = torch.cat([is_past, own < ends], 1)
        limit = self._first_full(own + 1)[:, :, None]  # of each query
        visible = torch.cat([
            is_quantized[:, None] & (quantized[:, None] < limit),
            is_full[:, None] & (full[:, None] >= limit),
        ], 2)  # fmt: skip
        positions = torch.cat([quantized, full], 1)
        distance = own[:, :, None] - positions[:, None]
        visible &= distance >= 0
        if buffer.window is not None:
            visible &= distance < buffer.window
        see_something(visible)
        added = ends - starts
        columns = torch.arange(rows.count)
        is_kept = (columns < added) & (columns >= added - buffer.size)
        last = after // group
        is_kept_block = is_completed & (completed >= last - buffer.block_count)
        return _ReadPlan(
            self._move(blocks % max(1, buffer.block_count)),
            self._move(past % buffer.size),
            completed.shape[1],
            self._move(index),
            self._move(visible[:, None]),
            self._plan_copies(is_kept, own % buffer.size, past.shape[1]),
            self._plan_copies(is_kept_block, completed % max(1, buffer.block_count), 0),
            positions,
        )

    def _first_full(self, lengths: Tensor) -> Tensor:
        """Return the first position in full precision where rows hold ``lengths`` tokens."""
        buffer = self._buffer
        if not buffer.rule.quantizes(buffer.window):
            return torch.zeros_like(lengths)
        group, residual = buffer.rule.group, buffer.rule.residual
        return ((lengths - residual).clamp_min(0) // group) * group

    def _plan_copies(self, is_kept: Tensor, entries: Tensor, offset: int) -> tuple[Index, Index]:
        """Return where in a buffer, and from where in this pass's K/V, kept columns are copied."""
        rows, columns = is_kept.nonzero(as_tuple=True)
        which = slice(None) if self._rows.is_even else self._move(rows)
        target, source = self._move(entries[rows, columns]), self._move(columns + offset)
        return (which, slice(None), target), (which, slice(None), source)


def _ranges(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return start, start + 1, ... of each row (R, n), and which of them are below its end."""
    count = max(0, int((end - start).max()))
    numbers = start + torch.arange(count, device=start.device)
    return numbers, numbers < end


def _tokens_of(blocks: Tensor, group: int) -> Tensor:
    """Return the positions (R, n x G) of the tokens of blocks (R, n)."""
    return (blocks[:, :, None] * group + torch.arange(group, device=blocks.device)).flatten(1)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Return values (B, H, S, ...) at ``index`` (R, n) along S: (B, H, n, ...)."""
    if len(index) == 1:
        return values.index_select(2, index[0])
    rows = torch.arange(len(index), device=index.device)[:, None]
    return values[rows, :, index].transpose(1, 2)
