"""A slot that keeps a fixed number of tokens, and the pass that decides which.

- By recency: the first tokens of a text and the newest (StreamingLLM, arXiv 2309.17453).
- By heavy hitters: the newest, and those to which the queries so far attended most, for each K/V
  head by itself (H2O, arXiv 2306.14048).

A token is dropped as soon as a newer one needs its place. So a query sees at most ``keep`` tokens,
itself included, also in a pass over many: what is kept does not depend on how a text is split into
passes. Keys keep the rotation of their own position in the text. StreamingLLM rotates them by
their place in the cache.

Shapes: B rows, H K/V heads, G query heads of each, S tokens kept, C tokens of this pass, N keys:
the tokens kept and those of this pass, D width of a head.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.cache.attention_pass import AttentionPass, KVContext, softmax_with_sink
from kvlab.cache.kv_buffer import (
    EncodedKV,
    EntryRange,
    KVBuffer,
    concatenate_parts,
    index_kv,
)
from kvlab.spec.eviction_config import EvictionRule

if TYPE_CHECKING:
    from kvlab.cache.kv_cache import KVCache


class EvictingBuffer(KVBuffer):
    """The parts of one slot, each (B, H, S, D), of the tokens that ``rule`` keeps.

    By recency, the first tokens have entries of their own, and the others are a ring. By heavy
    hitters, entries are in the order of the tokens, and each has a score and a position.
    """

    rule: EvictionRule
    scores: Tensor
    """(B, H, S) of float32: the attention that each kept token received; by heavy hitters."""
    token_positions: Tensor
    """(B, H, S) of int32; by heavy hitters."""

    @classmethod
    def of(cls, buffer: KVBuffer, rule: EvictionRule) -> "EvictingBuffer":
        """Return an empty ``buffer`` of ``rule.keep`` entries as one that evicts."""
        evicting = cls(buffer.parts, buffer.formats, buffer.dtype, None)
        evicting.rule = rule
        stored = buffer.parts[0][0]
        shape, device = stored.shape[:3] if rule.is_scored else (0, 0, 0), stored.device
        evicting.scores = torch.zeros(shape, dtype=torch.float32, device=device)
        evicting.token_positions = torch.zeros(shape, dtype=torch.int32, device=device)
        return evicting

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, self.scores, self.token_positions)

    def find_entries(self, positions: Tensor) -> Tensor:
        """Return the entries of tokens by recency."""
        sinks = self.rule.sinks
        return torch.where(
            positions < sinks, positions, sinks + (positions - sinks) % (self.size - sinks)
        )

    def stored_positions(self, lengths: Tensor) -> Tensor:
        sinks, ring = self.rule.sinks, self.size - self.rule.sinks
        last = lengths[:, None] - 1
        entries = torch.arange(self.size, device=lengths.device)
        newest = last - (last - sinks - (entries - sinks)) % ring
        positions = torch.where(entries < sinks, entries, newest)
        is_empty = torch.where(entries < sinks, entries > last, newest < sinks)
        return positions.masked_fill(is_empty, -1)

    def find_crop_problem(self, length: int, longest: int) -> str | None:
        if length in (0, longest) or (longest <= self.size and not self.rule.is_scored):
            return None
        if self.rule.is_scored:
            return "has scores of later queries"
        return f"has dropped all but {self.size} of {longest} tokens"

    def list_segment(self, start: int, end: int) -> list[EntryRange]:  # noqa: ARG002
        return []

    def list_snapshot(self, length: int) -> list[EntryRange]:
        tensors = self.tensors if self.rule.is_scored else super().tensors
        return [(tensors, [slice(0, min(length, self.size))])]

    def select_rows(self, index: Tensor) -> "EvictingBuffer":
        return self._copy_metadata(super().select_rows(index), index)

    def slice_rows(self, start: int, stop: int) -> "EvictingBuffer":
        return self._copy_metadata(super().slice_rows(start, stop), slice(start, stop))

    def _copy_metadata(self, rows: KVBuffer, index: Tensor | slice) -> "EvictingBuffer":
        copy = EvictingBuffer(rows.parts, self.formats, self.dtype, None)
        copy.rule, copy.scores, copy.token_positions = self.rule, self.scores, self.token_positions
        if self.rule.is_scored:
            copy.scores, copy.token_positions = self.scores[index], self.token_positions[index]
        return copy


@dataclass
class _PassKV:
    """What one slot has in this pass.

    Attributes:
        encoded: of this pass's tokens.
        parts: the decoded tokens kept, then this pass's, each (B, H, N, D).
        positions: of these tokens, (B, N), or (B, H, N) by heavy hitters; -1 where there is none.
        mask: of these tokens, (B, 1 or H, C, N).
        is_kept: (B, H, N), after this pass, by heavy hitters.
        scores: the same of float32.
    """

    encoded: EncodedKV
    parts: tuple[Tensor, ...]
    positions: Tensor
    mask: Tensor | None = None
    is_kept: Tensor | None = None
    scores: Tensor | None = None


class EvictingPass(AttentionPass):
    """A pass whose global layers evict. Local layers have rings, and are passed on.

    Args:
        local: the pass without eviction.
        count: tokens C of this pass.
        added: how many of them are real in each row.
    """

    def __init__(self, cache: "KVCache", local: AttentionPass, count: int, added: list[int]):
        self._cache, self._local, self._count = cache, local, count
        self._lengths = cache.row_lengths
        index = torch.arange(count, device=cache.device)
        self._queries = self._lengths[:, None] + index
        self._added = torch.tensor(added, device=cache.device)
        self._is_real = index < self._added[:, None]
        self._pending: dict[int, _PassKV] = {}

    @property
    def positions(self) -> Tensor:
        return self._local.positions

    @property
    def end(self) -> int:
        return self._local.end

    @property
    def position_limit(self) -> int:
        return self._local.position_limit

    def writes_kv(self, layer: int) -> bool:
        return self._local.writes_kv(layer)

    def write_kv(self, layer: int, *parts: Tensor) -> None:
        owner, buffer = self._find_buffer(layer)
        if buffer is None:
            self._local.write_kv(layer, *parts)
            return
        encoded = buffer.encode(parts)
        used = min(self._cache.length, buffer.size)
        kept = buffer.read(slice(0, used))
        current = self._queries.masked_fill(~self._is_real, -1)
        if buffer.rule.is_scored:
            entries = torch.arange(used, device=self._cache.device)
            is_empty = entries >= self._lengths[:, None].clamp_max(buffer.size)
            past = buffer.token_positions[:, :, :used].long()
            past = past.masked_fill(is_empty[:, None], -1)
            current = current[:, None].expand(-1, past.shape[1], -1)
        else:
            past = buffer.stored_positions(self._lengths)[:, :used]
        positions = torch.cat([past, current], -1)
        self._pending[owner] = _PassKV(
            encoded, concatenate_parts(kept, buffer.decode(encoded)), positions
        )

    def observe_queries(self, layer: int, queries: Tensor, sink: Tensor | None = None) -> None:
        owner, buffer = self._find_buffer(layer)
        if buffer is None:
            return
        pending = self._pending[owner]
        if buffer.rule.is_scored:
            self._rank(buffer, pending, queries, sink)
        elif pending.mask is None:
            keys, own = pending.positions[:, None], self._queries[:, :, None]
            visible = (keys >= 0) & (keys <= own)
            visible &= (keys < buffer.rule.sinks) | (own - keys < buffer.rule.recent)
            pending.mask = _see_something(visible[:, None])

    def read_kv(self, layer: int) -> KVContext:
        owner, buffer = self._find_buffer(layer)
        if buffer is None:
            return self._local.read_kv(layer)
        pending = self._pending[owner]
        return KVContext(pending.parts, pending.mask)

    def key_positions(self, layer: int) -> Tensor:
        owner, buffer = self._find_buffer(layer)
        return (
            self._local.key_positions(layer) if buffer is None else self._pending[owner].positions
        )

    def end_layer(self, layer: int) -> None:
        owner, buffer = self._find_buffer(layer)
        if buffer is None:
            self._local.end_layer(layer)
        elif self._cache.layout.last_readers[owner] == layer:
            self._store(buffer, self._pending.pop(owner))

    def finish(self) -> None:
        self._local.finish()

    def _find_buffer(self, layer: int) -> tuple[int, EvictingBuffer | None]:
        owner = self._cache.layout.owners[layer]
        buffer = self._cache.buffers[owner]
        return owner, buffer if isinstance(buffer, EvictingBuffer) else None

    def _rank(
        self, buffer: EvictingBuffer, pending: _PassKV, queries: Tensor, sink: Tensor | None
    ) -> None:
        """Drop tokens one by one, as the queries of this pass come."""
        keys, positions = pending.parts[0], pending.positions
        batch, heads, count = positions.shape
        grouped = queries.reshape(batch, heads, -1, self._count, queries.shape[-1])
        logits = grouped @ keys[:, :, None].mT / math.sqrt(queries.shape[-1])  # (B, H, G, C, N)
        past = count - self._count
        is_kept = positions >= 0
        is_kept[..., past:] = False
        scores = keys.new_zeros(positions.shape, dtype=torch.float32)
        scores[..., :past] = buffer.scores[:, :, :past].masked_fill(~is_kept[..., :past], 0.0)
        visible = []
        for i in range(self._count):
            is_real = self._is_real[:, i, None]
            is_kept[..., past + i] = is_real
            is_recent = positions > self._queries[:, i, None, None] - buffer.rule.recent
            can_go = is_kept & (positions >= buffer.rule.sinks) & ~is_recent
            lowest = scores.masked_fill(~can_go, math.inf).argmin(-1, keepdim=True)
            stays = is_kept.sum(-1, keepdim=True) <= buffer.size
            is_kept.scatter_(-1, lowest, is_kept.gather(-1, lowest) & stays)
            seen = logits[:, :, :, i].masked_fill(~is_kept[:, :, None], -math.inf)
            if sink is None:
                shares = seen.softmax(-1)
            else:
                shares = softmax_with_sink(seen, sink.view(heads, -1))
            received = shares.sum(2).float()
            scores += received.masked_fill(~is_real[..., None], 0.0)
            visible.append(is_kept.clone())
        mask = _see_something(torch.stack(visible, 2))
        if self._count > 1:  # one mask for each query head
            mask = mask.repeat_interleave(grouped.shape[2], 1)
        pending.mask, pending.is_kept, pending.scores = mask, is_kept, scores

    def _store(self, buffer: EvictingBuffer, new: _PassKV) -> None:
        if new.is_kept is not None and new.scores is not None:
            self._store_ranked(buffer, new, new.is_kept, new.scores)
            return
        end = (self._lengths + self._added)[:, None]
        is_newest = end - self._queries <= buffer.rule.recent
        is_kept = self._is_real & (is_newest | (self._queries < buffer.rule.sinks))
        rows, tokens = is_kept.nonzero(as_tuple=True)
        entries = buffer.find_entries(self._queries[rows, tokens])
        index = (rows, slice(None), tokens)
        buffer.write((rows, slice(None), entries), index_kv(new.encoded, index))

    def _store_ranked(
        self, buffer: EvictingBuffer, new: _PassKV, is_kept: Tensor, scores: Tensor
    ) -> None:
        past, size = is_kept.shape[-1] - self._count, min(is_kept.shape[-1], buffer.size)
        order = (~is_kept).byte().sort(dim=-1, stable=True).indices[..., :size]
        for part, added in zip(buffer.parts, new.encoded, strict=True):
            for stored, tensor in zip(part, added, strict=True):
                both = torch.cat([_as_bytes(stored[:, :, :past]), _as_bytes(tensor)], 2)
                index = order[..., None].expand(-1, -1, -1, both.shape[-1])
                _as_bytes(stored)[:, :, :size] = both.gather(2, index)
        buffer.scores[:, :, :size] = scores.gather(2, order)
        buffer.token_positions[:, :, :size] = new.positions.gather(2, order).int()


def _see_something(visible: Tensor) -> Tensor:
    """Let padding of a row that is still empty see one key instead of none, which would be NaN."""
    visible[..., 0] |= ~visible.any(-1)
    return visible


def _as_bytes(stored: Tensor) -> Tensor:
    """Return float8 as bytes, which every operation takes."""
    is_float8 = stored.dtype.is_floating_point and stored.itemsize == 1
    return stored.view(torch.uint8) if is_float8 else stored
