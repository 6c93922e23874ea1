"""Slots that rank tokens, as by the attention that they received, and keep the first.

- By a policy: the newest, and those of the highest score, such as those to which the queries so far
  attended most (H2O, arXiv 2306.14048), for each K/V head by itself. A token is dropped as soon as
  a newer one needs its place. So a query sees at most ``keep`` tokens, itself included, also in a
  pass over many.
- Of the prompt: its last tokens, and those that these rank highest by a policy, such as by how much
  they attend to them (SnapKV, arXiv 2404.14469), for each K/V head by itself. What follows the
  prompt is kept. A prompt is reduced once its last token is stored, wherever passes begin.

So what is kept never depends on how a text is split into passes. Keys keep the rotation of their
own position in the text. Eviction by recency is a ring with sinks (`RecencySlot`).

Shapes: B rows, H K/V heads, G query heads of each, S tokens kept, C tokens of this pass, N keys:
the tokens kept and those of this pass, D width of a head.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.cache.attention_pass import KVContext, softmax_with_sink
from kvlab.cache.kv_buffer import EncodedKV, KVBuffer, as_bytes, concatenate_parts
from kvlab.cache.slot_pass import EntryRange, PassRows, SlotPass, see_something
from kvlab.extensions.eviction.policies import HeavyHitters, RankingStep
from kvlab.extensions.eviction.slots import PromptSlot, RankedSlot
from kvlab.spec.members import MemberError


class RankedBuffer(KVBuffer):
    """The parts of one slot, each (B, H, S, D), in the order of the tokens that are kept.

    Attributes:
        scores: (B, H, S) of float32: by the policy, of each kept token.
        token_positions: (B, H, S) of int32.
    """

    has_fixed_shapes = False

    def __init__(
        self,
        plan: RankedSlot,
        batch_size: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(plan, batch_size, context, dtype, device)
        self.plan, self.rule, self.policy = plan, plan.rule, plan.rule.policy or HeavyHitters()
        shape = (batch_size, plan.layer.stored[0].count, self.size)
        self.scores = torch.zeros(shape, dtype=torch.float32, device=device)
        self.token_positions = torch.zeros(shape, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, self.scores, self.token_positions)

    def begin_pass(self, rows: PassRows) -> SlotPass:
        return RankedPass(self, rows)

    def list_segment(self, start: int, end: int) -> list[EntryRange]:  # noqa: ARG002
        return []

    def list_snapshot(self, length: int) -> list[EntryRange]:
        return [(self.tensors, [slice(0, min(length, self.size))])]

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> Self:
        rows = super().map_rows(select)
        rows.scores, rows.token_positions = select(self.scores), select(self.token_positions)
        return rows


class PromptBuffer(KVBuffer):
    """The parts of one slot that reduces a prompt: those kept of it, then the tokens after it.

    Until the prompt ends, its tokens are in entries of their own position. Heads keep different
    tokens of it, so their entries have no positions.

    Attributes:
        prompt: tokens that are reduced.
        scores: (B, H, prompt - recent) of float32: by the policy, of its tokens.
    """

    has_fixed_shapes = False

    def __init__(
        self,
        plan: PromptSlot,
        batch_size: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(plan, batch_size, context, dtype, device)
        self.plan, self.rule, self.prompt = plan, plan.rule, plan.prompt
        self.policy = plan.rule.policy or HeavyHitters()
        shape = (batch_size, plan.layer.stored[0].count, plan.ranked_tokens)
        self.scores = torch.zeros(shape, dtype=torch.float32, device=device)

    @property
    def entry_rule(self) -> Hashable:
        return type(self), self.prompt, self.rule.keep

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, self.scores)

    def begin_pass(self, rows: PassRows) -> SlotPass:
        return PromptPass(self, rows)

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

    def list_segment(self, start: int, end: int) -> list[EntryRange]:  # noqa: ARG002
        return []

    def list_snapshot(self, length: int) -> list[EntryRange]:
        ranges = [(super().tensors, [slice(0, self.plan.count_held(length))])]
        if self.plan.is_ranking(length):
            ranges.append(((self.scores,), [slice(0, self.scores.shape[2])]))
        return ranges

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> Self:
        rows = super().map_rows(select)
        rows.scores = select(self.scores)
        return rows


class ReducingPass(SlotPass):
    """What passes have in common whose queries rank tokens.

    Attributes:
        encoded: of this pass's tokens.
        parts: the decoded tokens kept, then this pass's, each (B, H, N, D).
        positions: of these tokens, (B, N), or (B, H, N) where heads differ; -1 for none.
        mask: of these tokens, (B, 1 or H, C, N).
        is_kept: (B, H, N), after this pass; None if all are.
    """

    encoded: EncodedKV
    parts: tuple[Tensor, ...]
    positions: Tensor
    mask: Tensor
    is_kept: Tensor | None = None

    def __init__(self, buffer: Any, rows: PassRows):
        self._buffer, self._rows = buffer, rows
        self._queries = rows.row_positions

    def write(self, parts: tuple[Tensor, ...]) -> None:
        buffer = self._buffer
        if not self._rows.is_even:  # padding is stored behind the kept: NaN would spread from there
            is_padding = ~self._rows.is_real[:, None, :, None]
            parts = tuple(part.masked_fill(is_padding, 0.0) for part in parts)
        self.encoded = buffer.encode(parts)
        used = max(map(buffer.plan.count_held, self._rows.past))
        kept = buffer.read(slice(0, used))
        current = self._queries.masked_fill(~self._rows.is_real, -1)
        self.positions = self._join_positions(used, current)
        self.parts = concatenate_parts(kept, buffer.decode(self.encoded))

    @abstractmethod
    def _join_positions(self, used: int, current: Tensor) -> Tensor:
        """Return ``positions``, given those of this pass (B, C) and how many entries are used."""

    def read(self) -> KVContext:
        return KVContext(self.parts, self.mask)

    def key_positions(self) -> Tensor:
        return self.positions

    def _rank(
        self,
        scores: Tensor,
        token: int,
        queries: Tensor,
        logits: Tensor,
        is_kept: Tensor,
        counts: Tensor,
        sink: Tensor | None,
    ) -> Tensor:
        """Return the scores (B, H, N) after a token of this pass has attended to what is kept.

        Args:
            scores: those before, which stay in rows where the token does not count.
            queries: of the token (B, H, G, D).
            logits: its scaled products with keys (B, H, G, N).
            is_kept: (B, H, N), of bool.
            counts: (B,), of bool.
        """
        heads, policy = logits.shape[1], self._buffer.policy
        seen = logits.masked_fill(~is_kept[:, :, None], -math.inf)
        step = RankingStep(
            softmax_with_sink(seen, None if sink is None else sink.view(heads, -1)),
            queries,
            self.parts[0],
            self.parts[1],
            self.positions.view(len(scores), -1, scores.shape[2]).expand_as(scores),
            self._queries[:, token, None, None],
            is_kept,
        )
        ranked = policy.rank(scores.clone(), step)
        if not isinstance(ranked, Tensor) or ranked.shape != scores.shape:
            is_tensor = isinstance(ranked, Tensor)
            found = tuple(ranked.shape) if is_tensor else type(ranked).__name__
            raise MemberError(policy, f"returns {found} from rank; return {tuple(scores.shape)}")
        return torch.where(counts[:, None, None], ranked.float(), scores)

    def _store_kept(self, is_kept: Tensor) -> Tensor:
        """Store in the first entries what is kept, in the order of tokens; return that order."""
        buffer, past = self._buffer, is_kept.shape[-1] - self._rows.count
        size = min(is_kept.shape[-1], buffer.size)
        order = (~is_kept).byte().sort(dim=-1, stable=True).indices[..., :size]
        for stored, added in zip(chain(*buffer.parts), chain(*self.encoded), strict=True):
            both = torch.cat([as_bytes(stored[:, :, :past]), as_bytes(added)], 2)
            index = order[..., None].expand(-1, -1, -1, both.shape[-1])
            as_bytes(stored)[:, :, :size] = both.gather(2, index)
        return order


class RankedPass(ReducingPass):
    """Drops tokens one by one, as the queries of the pass come."""

    _buffer: RankedBuffer
    _scores: Tensor

    def _join_positions(self, used: int, current: Tensor) -> Tensor:
        entries = torch.arange(used, device=self._rows.device)
        is_empty = entries >= self._rows.lengths[:, None].clamp_max(self._buffer.size)
        past = self._buffer.token_positions[:, :, :used].long()
        past = past.masked_fill(is_empty[:, None], -1)
        return torch.cat([past, current[:, None].expand(-1, past.shape[1], -1)], -1)

    def observe(self, queries: Tensor, sink: Tensor | None) -> None:
        buffer, positions = self._buffer, self.positions
        heads, past = positions.shape[1], positions.shape[2] - self._rows.count
        logits = _score(queries, self.parts[0])
        grouped = queries.reshape(len(queries), heads, -1, *queries.shape[2:])
        is_kept = positions >= 0
        is_kept[..., past:] = False
        scores = logits.new_zeros(positions.shape, dtype=torch.float32)
        scores[..., :past] = buffer.scores[:, :, :past].masked_fill(~is_kept[..., :past], 0.0)
        visible = []
        for i in range(self._rows.count):
            is_real = self._rows.is_real[:, i, None]
            is_kept[..., past + i] = is_real
            is_recent = positions > self._queries[:, i, None, None] - buffer.rule.recent
            can_go = is_kept & (positions >= buffer.rule.sinks) & ~is_recent
            finite = scores.clamp_max(torch.finfo(torch.float32).max)  # else all may be inf
            lowest = finite.masked_fill(~can_go, math.inf).argmin(-1, keepdim=True)
            stays = is_kept.sum(-1, keepdim=True) <= buffer.size
            is_kept.scatter_(-1, lowest, is_kept.gather(-1, lowest) & stays)
            token = grouped[:, :, :, i], logits[:, :, :, i]
            scores = self._rank(scores, i, *token, is_kept, is_real[:, 0], sink)
            visible.append(is_kept.clone())
        mask = see_something(torch.stack(visible, 2))
        # one mask for each query head, but of a decoded token
        self.mask = mask if len(visible) == 1 else mask.repeat_interleave(logits.shape[2], 1)
        self.is_kept, self._scores = is_kept, scores

    def finish(self) -> None:
        assert self.is_kept is not None, "queries were observed"
        order, buffer = self._store_kept(self.is_kept), self._buffer
        size = order.shape[-1]
        buffer.scores[:, :, :size] = self._scores.gather(2, order)
        buffer.token_positions[:, :, :size] = self.positions.gather(2, order).int()


class PromptPass(ReducingPass):
    """Lets the prompt's last queries rank its other tokens, and drops some where it ends."""

    _buffer: PromptBuffer
    _scores: Tensor | None = None

    def _join_positions(self, used: int, current: Tensor) -> Tensor:
        past = self._buffer.stored_positions(self._rows.lengths)[:, :used]
        return torch.cat([past, current], -1)

    def observe(self, queries: Tensor, sink: Tensor | None) -> None:
        buffer, rule = self._buffer, self._buffer.rule
        keys, own = self.positions[:, None], self._queries[:, :, None]
        visible = see_something((keys >= 0) & (keys <= own))  # (B, C, N)
        self.mask = visible[:, None]
        # the tokens of this pass that rank others in some row, and the rows whose prompt ends in it
        ranking: set[int] = set()
        ends, first = [], buffer.prompt - rule.recent
        for row, (length, added) in enumerate(zip(self._rows.past, self._rows.added, strict=True)):
            ranking |= {*range(max(0, first - length), min(added, buffer.prompt - length))}
            if length < buffer.prompt <= length + added:
                ends.append(row)
        if not ranking:
            return
        self._scores = self._rank_prompt(queries, sink, sorted(ranking))
        if not ends:
            return
        heads = queries.shape[1] // self.parts[0].shape[1]
        assert rule.pool is not None, "scores are pooled"
        scores = self._scores.nan_to_num(nan=-math.inf)
        scores = F.max_pool1d(scores, rule.pool, 1, rule.pool // 2)
        scores[..., : rule.sinks] = math.inf
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices
        is_chosen = torch.zeros_like(scores, dtype=torch.bool)
        is_chosen.scatter_(-1, chosen[..., : rule.keep - rule.recent], True)
        keys = keys.expand(-1, is_chosen.shape[1], -1)
        is_kept = is_chosen.gather(-1, keys.clamp(0, first - 1)) | (keys >= first)
        is_ended = torch.zeros(len(keys), 1, 1, dtype=torch.bool, device=keys.device)
        is_ended[ends] = True
        is_kept |= ~is_ended
        sees = visible[:, None] & (is_kept[:, :, None] | (own[:, None] < buffer.prompt))
        # one mask for each query head, but of a decoded token
        self.mask = sees if self._rows.count == 1 else sees.repeat_interleave(heads, 1)
        self.is_kept = is_kept & (keys >= 0)

    def _rank_prompt(self, queries: Tensor, sink: Tensor | None, ranking: list[int]) -> Tensor:
        """Return the scores (B, H, prompt - recent) of the prompt after the tokens ``ranking`` of
        this pass."""
        buffer, keys = self._buffer, self.parts[0]
        heads, first = buffer.scores.shape[1:]
        logits = _score(queries[:, :, ranking], keys)
        grouped = queries.reshape(len(keys), heads, -1, *queries.shape[2:])
        # of each key, its place among the scores that the buffer has
        place = self.positions[:, None].expand(-1, heads, -1)
        is_ranked = (place >= 0) & (place < first)
        place = place.clamp(0, first - 1)
        has_scores = is_ranked & (self._rows.lengths > first)[:, None, None]
        scores = buffer.scores.gather(2, place).masked_fill(~has_scores, 0.0)
        for i, token in enumerate(ranking):
            position = self._queries[:, token]
            counts = (position >= first) & (position < buffer.prompt)
            counts &= self._rows.is_real[:, token]
            visible = self.mask[:, :, token].expand(-1, heads, -1)
            query = grouped[:, :, :, token], logits[:, :, :, i]
            scores = self._rank(scores, token, *query, visible, counts, sink)
            scores = scores.masked_fill(~is_ranked, 0.0)
        return torch.zeros_like(buffer.scores).scatter_add(2, place, scores)

    def finish(self) -> None:
        if self._scores is not None:
            self._buffer.scores.copy_(self._scores)
        if self.is_kept is not None:
            self._store_kept(self.is_kept)
        else:
            self._buffer.write_newest(self._rows, self.encoded, self._rows.count)


def _score(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the scores (B, H, G, C, N) of queries (B, H G, C, D) and keys (B, H, N, D)."""
    grouped = queries.reshape(*keys.shape[:2], -1, *queries.shape[2:])
    return grouped @ keys[:, :, None].mT / math.sqrt(queries.shape[-1])
