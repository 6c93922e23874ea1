"""Score continuations by log-likelihood; each context is computed once.

One-shot: see `kvlab.evaluate.packed_scoring`. Served: the context's K/V enter the serving cache,
the cache's rows are repeated, and each row takes one continuation token by token, so that tied
caches and caches of low precision have their effect. Rows differ in length; see
`kvlab.cache.cached_passes`.

Shapes: R rows of continuations, E n_embd.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.evaluate.continuations import (
    Continuations,
    ContinuationScore,
    fit_to_block,
    sum_scores,
)
from kvlab.evaluate.forward_passes import OnCount, decode_rows, pass_rows
from kvlab.evaluate.packed_scoring import score_packed
from kvlab.model import GPT
from kvlab.model.generate import GraphDecoder, StaticDecoder, last_token_indices
from kvlab.model.kernels.malloc import keep_freed_memory
from kvlab.spec import ServingConfig

Pair = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation, neither empty."""


def score_pairs(
    model: GPT,
    pairs: Sequence[Pair],
    serving: ServingConfig | None = None,
    on_progress: OnCount = lambda _: None,
) -> list[ContinuationScore]:
    """Return the score of each continuation, as EleutherAI's lm-eval harness asks for it.

    Contexts that several pairs share are computed once. What exceeds the model is cut from the
    left.

    Args:
        serving: decode through this cache. None: one-shot.
        on_progress: called with the number of continuations that are newly done.
    """
    numbers: dict[tuple[int, ...], list[int]] = {}
    fitted = [fit_to_block(*pair, model.config.block_size) for pair in pairs]
    for number, (context, _) in enumerate(fitted):
        numbers.setdefault(tuple(context), []).append(number)
    groups = [
        Continuations(list(context), [fitted[number][1] for number in members])
        for context, members in numbers.items()
    ]
    with keep_freed_memory(model.device.type):
        scores = score_continuations(model, groups, serving, on_progress)
    by_number = {
        number: score
        for members, group_scores in zip(numbers.values(), scores, strict=True)
        for number, score in zip(members, group_scores, strict=True)
    }
    return [by_number[number] for number in range(len(pairs))]


@torch.inference_mode()
def score_continuations(
    model: GPT,
    groups: Sequence[Continuations],
    serving: ServingConfig | None,
    on_progress: OnCount,
) -> list[list[ContinuationScore]]:
    """Return the score of every ending of every group, in their order.

    Args:
        serving: decode through this cache. None: one-shot.
        on_progress: called with the number of endings that are newly done.
    """
    if serving is None:
        scored = score_packed(model, groups, on_progress)
    else:
        scored = _score_served(model, groups, serving, on_progress)
    scores: list[list[ContinuationScore | None]] = [[None] * len(group.endings) for group in groups]
    for group, ending, score in scored:
        scores[group][ending] = score
    return [[score for score in row if score is not None] for row in scores]


def _score_served(
    model: GPT, groups: Sequence[Continuations], serving: ServingConfig, on_progress: OnCount
) -> Iterator[tuple[int, int, ContinuationScore]]:
    """Yield scores through the cache. Contexts of similar length go together, and so do their
    endings, so that little of a pass is padding. A step is compiled anew for each size of a cache,
    so that with `serving.compile` all caches have one."""
    size = None
    if groups and serving.compile:
        rows, length = _cache_size(model, groups, range(len(groups)), serving)
        size = min(rows, sum(len(group.endings) for group in groups)), length
    for batch in _batch_groups(model, groups, serving, size):
        yield from _score_batch(model, groups, batch, serving, size, on_progress)


def _batch_groups(
    model: GPT,
    groups: Sequence[Continuations],
    serving: ServingConfig,
    size: tuple[int, int] | None,
) -> Iterator[list[int]]:
    """Yield numbers of groups with the shortest contexts first, as many as fit at once.

    Args:
        size: see `_score_batch`.
    """
    order = sorted(range(len(groups)), key=lambda i: len(groups[i].context))
    batch: list[int] = []
    for i in order:
        rows, _ = size or _cache_size(model, groups, [*batch, i], serving)
        if batch and len(batch) >= rows:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _cache_size(
    model: GPT, groups: Sequence[Continuations], batch: Sequence[int], serving: ServingConfig
) -> tuple[int, int]:
    """Return the most rows that are decoded side by side, and tokens that a row has to hold."""
    longest = max(len(ending) for i in batch for ending in groups[i].endings)
    length = max(len(groups[i].context) for i in batch) + longest - 1
    return min(decode_rows(model, length, serving), pass_rows(model, 1 + length // 2)), length


def _score_batch(
    model: GPT,
    groups: Sequence[Continuations],
    batch: Sequence[int],
    serving: ServingConfig,
    size: tuple[int, int] | None,
    on_progress: OnCount,
) -> Iterator[tuple[int, int, ContinuationScore]]:
    """Yield the number of the group, the number of its ending and the score.

    Args:
        size: rows and tokens of every cache that is decoded; None: as many as needed.
    """
    count, length = size or _cache_size(model, groups, batch, serving)
    cache = model.new_cache(len(batch), length, serving)
    tokens, lengths = _pad_rows(model, [groups[i].context for i in batch])
    last = model.hidden_states(
        tokens, cache, lengths, token_indices=last_token_indices(tokens, lengths)
    )
    rows = [(row, n) for row, i in enumerate(batch) for n in range(len(groups[i].endings))]
    rows.sort(key=lambda pair: len(groups[batch[pair[0]]].endings[pair[1]]))
    for start in range(0, len(rows), count):
        part = rows[start : start + count]
        padding = part[:1] * (0 if size is None else count - len(part))  # its scores are dropped
        endings = [groups[batch[row]].endings[n] for row, n in part + padding]
        cache_rows = torch.tensor([row for row, _ in part + padding], device=model.device)
        context = cache.select_rows(cache_rows)
        scores = _decode_endings(model, last[cache_rows], context, endings, on_progress)
        on_progress(len(part))
        for (row, n), score in zip(part, scores[: len(part)], strict=True):
            yield batch[row], n, score


def _decode_endings(
    model: GPT,
    last_hidden: Tensor,
    cache: KVCache,
    endings: Sequence[Sequence[int]],
    on_progress: OnCount,
) -> list[ContinuationScore]:
    """Return the scores of R endings whose contexts are in ``cache``.

    The last token of an ending is never fed.

    Args:
        last_hidden: (R, E), the residual stream that predicts their first tokens.
    """
    targets, lengths = _pad_rows(model, endings)
    count = targets.shape[1]
    states = [last_hidden]
    if count > 1:
        if cache.has_static_pass:
            decoded = _decode_static(model, cache, targets[:, :-1])
        else:
            fed = [len(ending) - 1 for ending in endings]
            decoded = _decode_ragged(model, cache, targets[:, :-1], fed)
        for state in decoded:
            states.append(state.clone())
            on_progress(0)
    is_real = torch.arange(count, device=model.device) < lengths[:, None]
    return sum_scores(model, torch.stack(states, 1)[is_real], endings)


def _decode_static(model: GPT, cache: KVCache, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the residual streams (R, E) after successive tokens (R, T), by the step of graphs.

    It takes rows of any lengths, and asks the device nothing. Rows that have ended go on with
    padding, which no other row sees.
    """
    decoder = GraphDecoder if model.device.type == "cuda" else StaticDecoder
    step = decoder(model, cache, head=False, compiles=cache.compiles_steps)
    for column in tokens.unbind(1):
        yield step(column)


def _decode_ragged(
    model: GPT, cache: KVCache, tokens: Tensor, fed: Sequence[int]
) -> Iterator[Tensor]:
    """Yield the same through a cache without that step. Rows end after ``fed`` tokens."""
    for position in range(tokens.shape[1]):
        counts = [int(position < count) for count in fed]
        yield model.hidden_states(tokens[:, position : position + 1], cache, counts)[:, -1]


def _pad_rows(model: GPT, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids (rows, longest), padded with zeros at the end, and the rows' lengths."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return tokens.to(model.device), lengths.to(model.device)
