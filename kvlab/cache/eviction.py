"""A slot that keeps a fixed number of tokens, and the pass that decides which.

- By recency: the first tokens of a text and the newest (StreamingLLM, arXiv 2309.17453).
- By heavy hitters: the newest, and those to which the queries so far attended most, for each K/V
  head by itself (H2O, arXiv 2306.14048).
- Of the prompt: its last tokens, and those to which these attend most, for each K/V head by itself
  (SnapKV, arXiv 2404.14469). What follows the prompt is kept.

In the first two a token is dropped as soon as a newer one needs its place. So a query sees at most
``keep`` tokens, itself included, also in a pass over many. A prompt is reduced once its last token
is stored, wherever passes begin. So what is kept never depends on how a text is split into passes.
Keys keep the rotation of their own position in the text. StreamingLLM rotates them by their place
in the cache.

Shapes: B rows, H K/V heads, G query heads of each, S tokens kept, C tokens of this pass, N keys:
the tokens kept and those of this pass, D width of a head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.cache.attention_pass import AttentionPass, KVContext, softmax_with_sink
from kvlab.cache.cached_passes import CachedPass, see_something
from kvlab.cache.formats import KVFormat
from kvlab.cache.kv_buffer import EncodedKV, EntryRange, KVBuffer, as_bytes, concatenate_parts
from kvlab.spec.layer_config import LayerConfig
from kvlab.spec.serving_config import EvictionRule

if TYPE_CHECKING:
    from kvlab.cache.kv_cache import KVCache


class EvictingBuffer(KVBuffer):
    """The parts of one slot, each (B, H, S, D), of the tokens that ``rule`` keeps.

    By recency, the first tokens have entries of their own, and the others are a ring. By heavy
    hitters, entries are in the order of the tokens, and each has a score and a position.

    Attributes:
        scores: by heavy hitters, (B, H, S) of float32: the attention that each kept token
            received. Of a prompt, (B, H, prompt - recent): that of its tokens in votes.
        token_positions: by heavy hitters, (B, H, S) of int32.
    """

    def __init__(
        self,
        layer: LayerConfig,
        batch_size: int,
        max_length: int,
        kv_format: KVFormat,
        dtype: torch.dtype,
        device: torch.device,
        rule: EvictionRule,
    ):
        entries = rule.count_entries(max_length)
        super().__init__(layer, batch_size, entries, kv_format, dtype, device)
        self.rule, self.sinks, self.ring = rule, rule.sinks, max(1, self.size - rule.sinks)
        stored, ranked = self.parts[0][0], rule.keep if rule.is_scored else 0
        scored = ranked if rule.prompt is None else rule.prompt - rule.recent
        ranked = ranked if rule.prompt is None else 0
        self.scores = stored.new_zeros(*stored.shape[:2], scored, dtype=torch.float32)
        self.token_positions = stored.new_zeros(*stored.shape[:2], ranked, dtype=torch.int32)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, self.scores, self.token_positions)

    def list_segment(self, start: int, end: int) -> list[EntryRange]:  # noqa: ARG002
        return []

    def list_snapshot(self, length: int) -> list[EntryRange]:
        tensors = self.tensors if self.rule.is_scored else super().tensors
        return [(tensors, [slice(0, min(length, self.size))])]

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> Self:
        rows = super().map_rows(select)
        rows.scores, rows.token_positions = select(self.scores), select(self.token_positions)
        return rows


class PromptBuffer(EvictingBuffer):
    """The parts of one slot that reduces a prompt: those kept of it, then the tokens after it.

    Until the prompt ends, its tokens are in entries of their own position. Heads keep different
    tokens of it, so their entries have no positions.
    """

    @property
    def prompt(self) -> int:
        assert self.rule.prompt is not None, "a prompt is reduced"
        return self.rule.prompt

    def find_entries(self, positions: Tensor) -> Tensor:
        dropped = self.prompt - self.rule.keep
        return torch.where(positions < self.prompt, positions, positions - dropped)

    def stored_positions(self, lengths: Tensor) -> Tensor:
        """Return positions (B, S), -1 where empty; for a reduced prompt any positions in it."""
        entries = torch.arange(self.size, device=lengths.device)
        is_later = (lengths[:, None] >= self.prompt) & (entries >= self.rule.keep)
        dropped = self.prompt - self.rule.keep
        positions = torch.where(is_later, entries + dropped, entries)
        return positions.masked_fill(positions >= lengths[:, None], -1)

    def list_snapshot(self, length: int) -> list[EntryRange]:
        parts = tuple(tensor for part in self.parts for tensor in part)
        ranges = [(parts, [slice(0, self.rule.count_held(length))])]
        if self.rule.is_voting(length):
            ranges.append(((self.scores,), [slice(0, self.scores.shape[2])]))
        return ranges


@dataclass
class _PassKV:
    """What one slot has in this pass.

    Attributes:
        encoded: of this pass's tokens.
        parts: the decoded tokens kept, then this pass's, each (B, H, N, D).
        positions: of these tokens, (B, N), or (B, H, N) by heavy hitters; -1 where there is none.
        mask: of these tokens, (B, 1 or H, C, N).
        is_kept: (B, H, N), after this pass, by heavy hitters, and where a prompt is reduced.
        scores: the same of float32; of a prompt its votes.
    """

    encoded: EncodedKV
    parts: tuple[Tensor, ...]
    positions: Tensor
    mask: Tensor | None = None
    is_kept: Tensor | None = None
    scores: Tensor | None = None


class EvictingPass(CachedPass):
    """A pass whose global layers evict. Local layers have rings, and are passed on.

    Args:
        local: the pass without eviction.
        count: tokens C of this pass.
        added: how many of them are real in each row.
    """

    def __init__(self, cache: "KVCache", local: AttentionPass, count: int, added: list[int]):
        super().__init__(cache, count, added)
        self._local, self._lengths = local, cache.row_lengths
        self._past, self._counts = cache.list_lengths(), added
        index = torch.arange(count, device=cache.device)
        self._queries = self._lengths[:, None] + index
        lengths = torch.tensor(added).to(cache.device, non_blocking=True)
        self._is_real = index < lengths[:, None]
        self.positions, self.end = local.positions, local.end
        self.position_limit = local.position_limit

    def write_kv(self, layer: int, *parts: Tensor) -> None:
        owner, buffer = self._find_buffer(layer)
        if buffer is None:
            self._local.write_kv(layer, *parts)
            return
        encoded = buffer.encode(parts)
        used = max(map(buffer.rule.count_held, self._cache.list_lengths()))
        kept = buffer.read(slice(0, used))
        current = self._queries.masked_fill(~self._is_real, -1)
        if buffer.rule.is_scored and not isinstance(buffer, PromptBuffer):
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
        if isinstance(buffer, PromptBuffer):
            self._reduce_prompt(buffer, pending, queries, sink)
        elif buffer.rule.is_scored:
            self._rank(buffer, pending, queries, sink)
        elif pending.mask is None:
            keys, own = pending.positions[:, None], self._queries[:, :, None]
            visible = (keys >= 0) & (keys <= own)
            visible &= (keys < buffer.rule.sinks) | (own - keys < buffer.rule.recent)
            pending.mask = see_something(visible[:, None])

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
        super().end_layer(layer)
        self._local.end_layer(layer)

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
        heads, past = positions.shape[1], positions.shape[2] - self._count
        logits = _score(queries, keys)
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
            by_head = None if sink is None else sink.view(heads, -1)
            received = softmax_with_sink(seen, by_head).sum(2).float()
            scores += received.masked_fill(~is_real[..., None], 0.0)
            visible.append(is_kept.clone())
        mask = see_something(torch.stack(visible, 2))
        if self._count > 1:  # one mask for each query head
            mask = mask.repeat_interleave(logits.shape[2], 1)
        pending.mask, pending.is_kept, pending.scores = mask, is_kept, scores

    def _reduce_prompt(
        self, buffer: PromptBuffer, pending: _PassKV, queries: Tensor, sink: Tensor | None
    ) -> None:
        """Let the prompt's last queries vote, and drop its other tokens where it ends."""
        keys, own = pending.positions[:, None], self._queries[:, :, None]
        visible = see_something((keys >= 0) & (keys <= own))  # (B, C, N)
        pending.mask = visible[:, None]
        # the tokens of this pass that vote in some row, and the rows whose prompt ends in it
        voting: set[int] = set()
        ends, first = [], buffer.prompt - buffer.rule.recent
        for row, (length, added) in enumerate(zip(self._past, self._counts, strict=True)):
            voting |= {*range(max(0, first - length), min(added, buffer.prompt - length))}
            if length < buffer.prompt <= length + added:
                ends.append(row)
        if not voting:
            return
        voters = sorted(voting)
        pending.scores = self._count_votes(buffer, pending, queries[:, :, voters], sink, voters)
        if not ends:
            return
        rule, heads = buffer.rule, queries.shape[1] // pending.parts[0].shape[1]
        assert rule.pool is not None, "votes are pooled"
        votes = F.max_pool1d(pending.scores, rule.pool, 1, rule.pool // 2)
        votes[..., : rule.sinks] = math.inf
        chosen = votes.sort(dim=-1, descending=True, stable=True).indices
        is_chosen = torch.zeros_like(votes, dtype=torch.bool)
        is_chosen.scatter_(-1, chosen[..., : rule.keep - rule.recent], True)
        keys = keys.expand(-1, is_chosen.shape[1], -1)
        is_kept = is_chosen.gather(-1, keys.clamp(0, first - 1)) | (keys >= first)
        is_ended = torch.zeros(len(keys), 1, 1, dtype=torch.bool, device=keys.device)
        is_ended[ends] = True
        is_kept |= ~is_ended
        sees = visible[:, None] & (is_kept[:, :, None] | (own[:, None] < buffer.prompt))
        # one mask for each query head, but of a decoded token
        pending.mask = sees if self._count == 1 else sees.repeat_interleave(heads, 1)
        pending.is_kept = is_kept & (keys >= 0)

    def _count_votes(
        self, buffer: PromptBuffer, new: _PassKV, queries: Tensor, sink: Tensor | None, voters: Any
    ) -> Tensor:
        """Return the votes (B, H, prompt - recent) of the prompt with those of ``voters``, tokens
        of this pass that have ``queries``."""
        assert new.mask is not None, "what they see is known"
        heads, first = buffer.scores.shape[1:]
        logits = _score(queries, new.parts[0])
        logits = logits.masked_fill(~new.mask[:, :, None, voters], -math.inf).flatten(1, 2)
        shares = softmax_with_sink(logits, sink)
        shares = shares.view(len(shares), heads, -1, *shares.shape[2:]).sum(2)  # (B, H, C, N)
        positions = self._queries[:, voters]
        votes = self._is_real[:, voters] & (positions >= first) & (positions < buffer.prompt)
        received = (shares * votes[:, None, :, None]).sum(2).float()
        token = new.positions[:, None].expand(-1, heads, -1)
        received = received.masked_fill((token < 0) | (token >= first), 0.0)
        has_votes = (self._lengths > first)[:, None, None]
        total = buffer.scores.masked_fill(~has_votes, 0.0)
        return total.scatter_add(-1, token.clamp(0, first - 1), received)

    def _store(self, buffer: EvictingBuffer, new: _PassKV) -> None:
        is_prompt = isinstance(buffer, PromptBuffer)
        if is_prompt and new.scores is not None:
            buffer.scores.copy_(new.scores)
        if new.is_kept is None:
            recent = self._count if is_prompt else buffer.rule.recent
            self._store_newest(buffer, new.encoded, recent)
            return
        # in the first entries what is kept, of the past and of this pass, in order of tokens
        past = new.is_kept.shape[-1] - self._count
        size = min(new.is_kept.shape[-1], buffer.size)
        order = (~new.is_kept).byte().sort(dim=-1, stable=True).indices[..., :size]
        for stored, added in zip(chain(*buffer.parts), chain(*new.encoded), strict=True):
            both = torch.cat([as_bytes(stored[:, :, :past]), as_bytes(added)], 2)
            index = order[..., None].expand(-1, -1, -1, both.shape[-1])
            as_bytes(stored)[:, :, :size] = both.gather(2, index)
        if not is_prompt and new.scores is not None:
            buffer.scores[:, :, :size] = new.scores.gather(2, order)
            buffer.token_positions[:, :, :size] = new.positions.gather(2, order).int()


def _score(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the scores (B, H, G, C, N) of queries (B, H G, C, D) and keys (B, H, N, D)."""
    grouped = queries.reshape(*keys.shape[:2], -1, *queries.shape[2:])
    return grouped @ keys[:, :, None].mT / math.sqrt(queries.shape[-1])
