"""Score continuations by log-likelihood; each context is computed once.

One-shot, a context and all that may follow it are one row of one pass. All continuations of a
context see its K/V, and a mask separates them from each other (`kvlab.cache.uncached_passes`). Rows
of similar length share a pass, so that little of it is padding, and logits are computed only where
a token is predicted. A model that is trained with K/V in blocks (KIVI) has each continuation in a
row of its own: which tokens are rounded there depends on how many follow.

Served, the context's K/V enter the serving cache, the cache's rows are repeated, and each row takes
one continuation token by token, so that tied caches and caches of low precision have their effect.

Shapes: R rows, T tokens of the longest, P predicted tokens, E n_embd.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvlab.cache import KVCache, make_rounding
from kvlab.cache.uncached_passes import PADDING, SHARED_PREFIX, TreePass
from kvlab.evaluate.forward_passes import (
    SILENT,
    Arrays,
    Part,
    decode_rows,
    join_arrays,
    pass_rows,
)
from kvlab.model import GPT
from kvlab.model.generate import Decoder, GraphDecoder, StaticDecoder, last_token_indices
from kvlab.model.kernels.malloc import keep_freed_memory
from kvlab.model.loss import token_scores
from kvlab.spec import ServingConfig

MAX_ROW_TOKENS = 1024
"""A context whose continuations exceed this is computed again for the rest of them."""

FULL_SPEED_TOKENS = 512
"""Passes of this many tokens are about as fast per token as larger ones, on CPU."""

MAX_PADDING = 1.03
"""The most tokens of a pass, as a multiple of its real ones, beyond `FULL_SPEED_TOKENS`."""

Pair = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation, neither empty."""


class Continuations(NamedTuple):
    """A context that is computed once, and its continuations; token ids, never empty."""

    context: list[int]
    endings: list[list[int]]


class ContinuationScore(NamedTuple):
    """Score of one continuation after its context.

    Attributes:
        nats: the sum of -log p of its tokens, in float64.
        is_greedy: whether each of its tokens is the most likely one.
    """

    nats: float
    is_greedy: bool


Place = tuple[int, int]
"""The number of a group, and the number of its ending."""


def fit_to_block(context: list[int], ending: list[int], block_size: int) -> Pair:
    """Return the last ``block_size + 1`` tokens of a context and its ending, still in two parts.

    The last token is predicted and never fed, so this is what fits in the model.
    """
    tokens = (context + ending)[-(block_size + 1) :]
    scored = min(len(ending), len(tokens) - 1)
    return tokens[:-scored], tokens[-scored:]


def score_pairs(
    model: GPT,
    pairs: Sequence[Pair],
    serving: ServingConfig | None = None,
    part: Part = SILENT,
) -> list[ContinuationScore]:
    """Return the score of each continuation, as EleutherAI's lm-eval harness asks for it.

    Contexts that several pairs share are computed once. What exceeds the model is cut from the
    left.

    Args:
        serving: decode through this cache. None: one-shot.
        part: advanced by the continuations that are newly done.
    """
    groups: dict[tuple[int, ...], Continuations] = {}
    places = []
    for pair in pairs:
        context, ending = fit_to_block(*pair, model.config.block_size)
        group = groups.setdefault(tuple(context), Continuations(context, []))
        places.append((tuple(context), len(group.endings)))
        group.endings.append(ending)
    with keep_freed_memory(model.device.type):
        scores = score_continuations(model, list(groups.values()), serving, part)
    by_context = dict(zip(groups, scores, strict=True))
    return [by_context[context][number] for context, number in places]


@torch.inference_mode()
def score_continuations(
    model: GPT, groups: Sequence[Continuations], serving: ServingConfig | None, part: Part
) -> list[list[ContinuationScore]]:
    """Return the score of every ending of every group, in their order.

    Args:
        serving: decode through this cache. None: one-shot.
        part: advanced by the endings that are newly done.
    """
    scores: list[list[Any]] = [[None] * len(group.endings) for group in groups]
    if serving is None:
        batches = _score_one_shot(model, groups, part)
    else:
        batches = _score_served(model, groups, serving, part)
    for done in batches:
        columns = (done[name].tolist() for name in ("group", "ending", "nats", "is_greedy"))
        for group, ending, *values in zip(*columns, strict=True):
            scores[group][ending] = ContinuationScore(*values)
    return scores


def _sum_scores(
    model: GPT, hidden_states: Tensor, endings: Sequence[Sequence[int]], places: Sequence[Place]
) -> Arrays:
    """Return ``nats`` and ``is_greedy`` of each ending beside its place, ``group`` and ``ending``.

    Args:
        hidden_states: (P, E), the residual stream that predicts the endings' tokens, concatenated.
    """
    counts = torch.tensor([len(ending) for ending in endings])
    targets = torch.tensor([token for ending in endings for token in ending])
    losses, hits = token_scores(hidden_states, model.lm_head.weight, targets.to(model.device))
    sums = torch.zeros(2, len(endings), dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(endings)), counts)
    sums.index_add_(1, owner, torch.stack([losses.double(), hits.double()]).cpu())
    nats, n_hits = sums.numpy()
    groups, numbers = np.array(places, np.int64).T
    is_greedy = n_hits == counts.numpy()
    return {"group": groups, "ending": numbers, "nats": nats, "is_greedy": is_greedy}


# One-shot


@dataclass
class _PackedRow:
    """A context and some of its continuations without their last tokens, which are predicted and
    never fed.

    Attributes:
        group: number of the context.
        length: tokens of the row.
        endings: numbers of the continuations.
    """

    group: int
    length: int
    endings: list[int] = field(default_factory=list)


def _score_one_shot(model: GPT, groups: Sequence[Continuations], part: Part) -> Iterator[Arrays]:
    row_tokens = MAX_ROW_TOKENS if model.has_single_tokens else 0
    rows = sorted(_pack_rows(groups, row_tokens), key=lambda row: row.length)

    def compute(batch: Sequence[_PackedRow]) -> Arrays:
        scored = _score_pass(model, groups, batch)
        part.advance(len(scored["nats"]))
        return scored

    return part.keep(compute, _split_passes(model, rows))


def _pack_rows(groups: Sequence[Continuations], row_tokens: int) -> Iterator[_PackedRow]:
    for number, group in enumerate(groups):
        row = _PackedRow(number, len(group.context))
        for i, ending in enumerate(group.endings):
            if row.endings and row.length + len(ending) - 1 > row_tokens:
                yield row
                row = _PackedRow(number, len(group.context))
            row.endings.append(i)
            row.length += len(ending) - 1
        yield row


def _split_passes(model: GPT, rows: Sequence[_PackedRow]) -> Iterator[Sequence[_PackedRow]]:
    """Yield the rows, sorted by length, that share a pass.

    It ends when the longest row leaves no room for another, or when the pass is large enough to
    be fast and another row would add padding.
    """
    end = 0
    while end < len(rows):
        start, end, real = end, end + 1, rows[end].length
        while end < len(rows) and end - start < pass_rows(model, rows[end].length):
            padded = (end - start + 1) * rows[end].length
            if real >= FULL_SPEED_TOKENS and padded > MAX_PADDING * (real + rows[end].length):
                break
            real += rows[end].length
            end += 1
        yield rows[start:end]


def _score_pass(model: GPT, groups: Sequence[Continuations], rows: Sequence[_PackedRow]) -> Arrays:
    length = max(row.length for row in rows)
    tokens, positions, branches = (
        torch.full((len(rows), length), fill) for fill in (0, 0, PADDING)
    )
    predicting: list[Tensor] = []  # indices into the pass of what predicts each ending's tokens
    targets: list[list[int]] = []
    for r, row in enumerate(rows):
        group = groups[row.group]
        prefix = len(group.context)
        tokens[r, :prefix] = torch.tensor(group.context)
        positions[r, :prefix] = torch.arange(prefix)
        branches[r, :prefix] = SHARED_PREFIX
        start = prefix
        for branch, i in enumerate(row.endings, start=1):
            ending = group.endings[i]
            end = start + len(ending) - 1
            tokens[r, start:end] = torch.tensor(ending[:-1], dtype=torch.int64)
            positions[r, start:end] = prefix + torch.arange(end - start)
            branches[r, start:end] = branch
            last_of_prefix = torch.tensor([r * length + prefix - 1])
            predicting += [last_of_prefix, r * length + torch.arange(start, end)]
            targets.append(ending)
            start = end
    device = model.device
    tokens, predicted = tokens.to(device), torch.cat(predicting).to(device)
    if not model.has_single_tokens:  # one continuation a row, and padding at its end
        states = model.hidden_states(tokens, token_indices=predicted)
    else:
        tree = TreePass(
            model.config.kv_owners,
            model.config.layers,
            positions.to(device),
            branches.to(device),
            model.dtype,
            make_rounding(model.trained_kv),
        )
        states = model.run_pass(tokens, tree, predicted)
    return _sum_scores(
        model, states, targets, [(row.group, i) for row in rows for i in row.endings]
    )


# Through the serving cache


def _score_served(
    model: GPT, groups: Sequence[Continuations], serving: ServingConfig, part: Part
) -> Iterator[Arrays]:
    """Score groups with the shortest contexts first, as many as fit at once, so that little of a
    pass is padding."""
    size, step = None, None
    if groups:
        rows, length = _cache_size(model, groups, serving)
        is_cuda = model.device.type == "cuda"
        is_captured = is_cuda and model.new_cache(1, length, serving).has_static_pass
        if serving.compile or is_captured:  # anew for each size of a cache
            size = min(rows, sum(len(group.endings) for group in groups)), length
            step = _RowsStep(model)

    def compute(batch: Sequence[int]) -> Arrays:
        return _score_batch(model, groups, batch, serving, size, step, part)

    return part.keep(compute, _split_batches(model, groups, serving, size))


def _split_batches(
    model: GPT,
    groups: Sequence[Continuations],
    serving: ServingConfig,
    size: tuple[int, int] | None,
) -> Iterator[Sequence[int]]:
    """Yield the numbers of the groups whose contexts share a cache."""
    batch: list[int] = []
    for i in sorted(range(len(groups)), key=lambda i: len(groups[i].context)):
        rows, _ = size or _cache_size(model, [groups[j] for j in (*batch, i)], serving)
        if batch and len(batch) >= rows:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _cache_size(
    model: GPT, groups: Sequence[Continuations], serving: ServingConfig
) -> tuple[int, int]:
    """Return the most rows that are decoded side by side, and tokens that a row has to hold."""
    longest = max(len(ending) for group in groups for ending in group.endings)
    length = max(len(group.context) for group in groups) + longest - 1
    return min(decode_rows(model, length, serving), pass_rows(model, 1 + length // 2)), length


class _RowsStep:
    """A decode step that is captured once, for the first of several caches of one size.

    The others are copied into the first.
    """

    def __init__(self, model: GPT):
        self._model = model
        self._cache: KVCache | None = None
        self._step: GraphDecoder | StaticDecoder | None = None

    def start(self, cache: KVCache) -> Decoder:
        """Return the step that goes on from the tokens in ``cache``."""
        if self._cache is None or self._step is None:
            decoder = GraphDecoder if self._model.device.type == "cuda" else StaticDecoder
            self._cache = cache
            self._step = decoder(self._model, cache, head=False, compiles=cache.compiles_steps)
            return self._step
        for own, new in zip(self._cache.tensors, cache.tensors, strict=True):
            own.copy_(new)
        self._cache.reset()
        self._cache.advance(cache.list_lengths())
        return self._step


def _score_batch(
    model: GPT,
    groups: Sequence[Continuations],
    batch: Sequence[int],
    serving: ServingConfig,
    size: tuple[int, int] | None,
    step: _RowsStep | None,
    part: Part,
) -> Arrays:
    """Score the endings of the groups ``batch``, those of similar length together.

    Args:
        size: rows and tokens of every cache that is decoded; None: as many as needed.
        step: of caches of that size; None: each has its own.
    """
    count, length = size or _cache_size(model, [groups[i] for i in batch], serving)
    cache = model.new_cache(len(batch), length, serving)
    tokens, lengths = _pad_rows(model, [groups[i].context for i in batch])
    last = model.hidden_states(
        tokens, cache, lengths, token_indices=last_token_indices(tokens, lengths)
    )
    rows = [(row, n) for row, i in enumerate(batch) for n in range(len(groups[i].endings))]
    rows.sort(key=lambda pair: len(groups[batch[pair[0]]].endings[pair[1]]))
    scored: list[Arrays] = []
    for start in range(0, len(rows), count):
        real = rows[start : start + count]
        # the scores of padding are dropped
        some = real + real[:1] * (0 if size is None else count - len(real))
        endings = [groups[batch[row]].endings[n] for row, n in some]
        cache_rows = torch.tensor([row for row, _ in some], device=model.device)
        context = cache.select_rows(cache_rows)
        own_step = step or _RowsStep(model)
        states = _decode_endings(model, last[cache_rows], context, endings, own_step, part)
        part.advance(len(real))
        found = _sum_scores(model, states, endings, [(batch[row], n) for row, n in some])
        scored.append({name: column[: len(real)] for name, column in found.items()})
    return join_arrays(scored)


def _decode_endings(
    model: GPT,
    last_hidden: Tensor,
    cache: KVCache,
    endings: Sequence[Sequence[int]],
    rows_step: _RowsStep,
    part: Part,
) -> Tensor:
    """Return what predicts the P tokens of R endings whose contexts are in ``cache``, (P, E).

    The last token of an ending is never fed.

    Args:
        last_hidden: (R, E), the residual stream that predicts their first tokens.
    """
    targets, lengths = _pad_rows(model, endings)
    count = targets.shape[1]
    states = [last_hidden]
    step = rows_step.start(cache) if cache.has_static_pass and count > 1 else None
    for position, column in enumerate(targets[:, :-1].unbind(1)):
        if step is not None:
            # The step of graphs takes rows of any lengths, and asks the device nothing. Rows that
            # have ended go on with padding, which no other row sees.
            state = step(column)
        else:  # rows end with their endings
            counts = [int(position < len(ending) - 1) for ending in endings]
            state = model.hidden_states(column[:, None], cache, counts)[:, -1]
        states.append(state.clone())
        part.advance(0)
    is_real = torch.arange(count, device=model.device) < lengths[:, None]
    return torch.stack(states, 1)[is_real]


def _pad_rows(model: GPT, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids (rows, longest), padded with zeros at the end, and the rows' lengths."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return tokens.to(model.device), lengths.to(model.device)
