"""Scores of endings, their context computed once.

One-shot: `kvlab.evaluate.packed_scoring`. Served: the context's K/V go into the cache that serves, the
cache's rows are repeated, and each row takes one ending token by token, where tied or coarse
caches show. Rows differ in length; see `kvlab.cache.cached_passes`.

N contexts, R rows of endings, E n_embd.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.evaluate.forward_passes import decode_rows, pass_rows
from kvlab.evaluate.hellaswag_prompts import Continuations
from kvlab.evaluate.packed_scoring import ContinuationScore, packed_scores, sum_scores
from kvlab.model import GPT
from kvlab.model.generate import last_token_indices
from kvlab.model.kernels import keep_freed_memory
from kvlab.spec import ServingConfig


@torch.inference_mode()
def score_continuations(
    model: GPT,
    branches: Sequence[Continuations],
    serving: ServingConfig | None,
    tick: Callable[[int], None],
) -> list[list[ContinuationScore]]:
    """The score of every ending after its context, in the order given.

    Args:
        serving: token by token through this cache; None: one-shot.
        tick: called now and then with the number of endings that are newly done.
    """
    if serving is None:
        found = packed_scores(model, branches, tick)
    else:
        found = _served_scores(model, branches, serving, tick)
    scores: list[list[ContinuationScore | None]] = [
        [None] * len(branch.endings) for branch in branches
    ]
    for branch, ending, score in found:
        scores[branch][ending] = score
    return [[score for score in row if score is not None] for row in scores]


def _served_scores(
    model: GPT,
    branches: Sequence[Continuations],
    serving: ServingConfig,
    tick: Callable[[int], None],
) -> Iterator[tuple[int, int, ContinuationScore]]:
    """Contexts of about equal length go together, and of their endings again those of about
    equal length, so that little of a pass is padding."""
    for batch in _batches(model, branches, serving):
        yield from _score_batch(model, branches, batch, serving, tick)


def _batches(
    model: GPT, branches: Sequence[Continuations], serving: ServingConfig
) -> Iterator[list[int]]:
    """Numbers of branches, the shortest contexts first, as many as memory and speed allow."""
    order = sorted(range(len(branches)), key=lambda i: len(branches[i].context))
    batch: list[int] = []
    for i in order:
        if len(batch) >= _max_rows(model, _longest_row(branches, [*batch, i]), serving) and batch:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _longest_row(branches: Sequence[Continuations], batch: Sequence[int]) -> int:
    """Tokens that a row may have to hold."""
    ending = max(len(ending) for i in batch for ending in branches[i].endings)
    return max(len(branches[i].context) for i in batch) + ending - 1


def _max_rows(model: GPT, length: int, serving: ServingConfig) -> int:
    return min(decode_rows(model, length, serving), pass_rows(model, 1 + length // 2))


def _score_batch(
    model: GPT,
    branches: Sequence[Continuations],
    batch: Sequence[int],
    serving: ServingConfig,
    tick: Callable[[int], None],
) -> Iterator[tuple[int, int, ContinuationScore]]:
    """Number of the branch, number of its ending, and its score."""
    length = _longest_row(branches, batch)
    cache = model.new_cache(len(batch), length, serving)
    tokens, lengths = _pad_rows(model, [branches[i].context for i in batch])
    last = model.hidden_states(
        tokens, cache, lengths, token_indices=last_token_indices(tokens, lengths)
    )
    rows = [(at, n) for at, i in enumerate(batch) for n in range(len(branches[i].endings))]
    rows.sort(key=lambda row: len(branches[batch[row[0]]].endings[row[1]]))
    size = _max_rows(model, length, serving)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        chosen = torch.tensor([at for at, _ in part], device=model.device)
        endings = [branches[batch[at]].endings[n] for at, n in part]
        context = cache.select_rows(chosen)
        scores = _decode_continuations(model, last[chosen], context, endings, tick)
        tick(len(part))
        for (at, n), score in zip(part, scores, strict=True):
            yield batch[at], n, score


def _decode_continuations(
    model: GPT,
    before: Tensor,
    cache: KVCache,
    endings: Sequence[Sequence[int]],
    tick: Callable[[int], None],
) -> list[ContinuationScore]:
    """Scores of R endings whose contexts are in ``cache``; ``before`` (R, E) is the residual
    stream that predicts their first tokens. The last tokens are never fed."""
    targets, lengths = _pad_rows(model, endings)
    parts = [before[:, None]]
    for at in range(targets.shape[1] - 1):
        real = (lengths - 1 - at).clamp(0, 1)
        parts.append(model.hidden_states(targets[:, at : at + 1], cache=cache, lengths=real))
        tick(0)
    seen = torch.arange(targets.shape[1], device=model.device) < lengths[:, None]
    return sum_scores(model, torch.cat(parts, 1)[seen], endings)


def _pad_rows(model: GPT, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids (rows, longest), zeros after each row's end, and the rows' lengths."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return tokens.to(model.device), lengths.to(model.device)


# Log-likelihoods of continuations, as EleutherAI's lm-eval harness asks for them.
#
# Contexts that several continuations share, as the choices of one question do, are computed once;
# see `kvlab.evaluate.scoring`.


Pair = tuple[list[int], list[int]]
"""Ids of a context and of its continuation, neither empty."""


def score_pairs(
    model: GPT,
    pairs: Sequence[Pair],
    serving: ServingConfig | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> list[ContinuationScore]:
    """Each continuation after its context; what exceeds the model is cut from the left.

    Args:
        serving: token by token through this cache; None: one-shot.
        tick: called now and then with the number of continuations that are newly done.
    """
    places: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for number, pair in enumerate(pairs):
        context, ending = _fit_pair(pair, model.config.block_size)
        places.setdefault(tuple(context), []).append((number, ending))
    branches = [
        Continuations(list(context), [ending for _, ending in endings])
        for context, endings in places.items()
    ]
    found: dict[int, ContinuationScore] = {}
    with keep_freed_memory(model.device.type):
        scored = score_continuations(model, branches, serving, tick)
    for endings, scores in zip(places.values(), scored, strict=True):
        found.update((number, score) for (number, _), score in zip(endings, scores, strict=True))
    return [found[number] for number in range(len(pairs))]


def _fit_pair(pair: Pair, block_size: int) -> Pair:
    """The last ``block_size + 1`` tokens of both: the last one is predicted, never fed."""
    context, ending = pair
    kept = (context + ending)[-(block_size + 1) :]
    scored = min(len(ending), len(kept) - 1)
    return kept[:-scored], kept[-scored:]
