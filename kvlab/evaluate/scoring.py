"""Log-likelihoods of endings, their context computed once.

The context's K/V go into a cache, the cache's rows are repeated, and each row takes one ending:
in one pass (one-shot: through a cache as the model was trained, which is exact), or token by
token as in serving, where tied or coarse caches show. Rows differ in length; see
`kvlab.cache.cached_steps`.

N contexts, R rows of endings, E n_embd.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.evaluate.batching import decode_rows, pass_rows
from kvlab.evaluate.questions import Branches
from kvlab.model import GPT
from kvlab.model.loss import token_losses
from kvlab.spec.parts import ServingConfig


@dataclass(frozen=True)
class Path:
    """How endings are scored: through which cache, and in steps of one token or in one."""

    serving: ServingConfig | None
    token_by_token: bool


ONE_SHOT = Path(None, token_by_token=False)


@torch.inference_mode()
def ending_losses(
    model: GPT, branches: Sequence[Branches], path: Path, tick: Callable[[int], None]
) -> list[list[float]]:
    """Summed nats of every ending after its context, in the order given.

    Contexts of about equal length go together, and of their endings again those of about equal
    length, so that little of a pass is padding.

    Args:
        tick: called now and then with the number of endings that are newly done.
    """
    losses = [[0.0] * len(branch.endings) for branch in branches]
    for batch in _batches(model, branches, path):
        for branch, ending, loss in _score(model, branches, batch, path, tick):
            losses[branch][ending] = loss
    return losses


def _batches(model: GPT, branches: Sequence[Branches], path: Path) -> Iterator[list[int]]:
    """Numbers of branches, the shortest contexts first, as many as memory and speed allow."""
    order = sorted(range(len(branches)), key=lambda i: len(branches[i].context))
    batch: list[int] = []
    for i in order:
        if len(batch) >= _most_rows(model, _longest(branches, [*batch, i]), path) and batch:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _longest(branches: Sequence[Branches], batch: Sequence[int]) -> int:
    """Tokens that a row may have to hold."""
    ending = max(len(ending) for i in batch for ending in branches[i].endings)
    return max(len(branches[i].context) for i in batch) + ending - 1


def _most_rows(model: GPT, length: int, path: Path) -> int:
    return min(decode_rows(model, length, path.serving), pass_rows(model, 1 + length // 2))


def _score(
    model: GPT,
    branches: Sequence[Branches],
    batch: Sequence[int],
    path: Path,
    tick: Callable[[int], None],
) -> Iterator[tuple[int, int, float]]:
    """Number of the branch, number of its ending, and summed nats."""
    length = _longest(branches, batch)
    cache = model.new_cache(len(batch), length, path.serving)
    tokens, lengths = _padded(model, [branches[i].context for i in batch])
    hidden = model.hidden(tokens, cache=cache, lengths=lengths)
    last = hidden[torch.arange(len(batch), device=model.device), lengths - 1]
    rows = [(at, n) for at, i in enumerate(batch) for n in range(len(branches[i].endings))]
    rows.sort(key=lambda row: len(branches[batch[row[0]]].endings[row[1]]))
    size = _most_rows(model, length, path)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        chosen = torch.tensor([at for at, _ in part], device=model.device)
        endings = [branches[batch[at]].endings[n] for at, n in part]
        context = cache.select_rows(chosen)
        losses = _summed(model, last[chosen], context, endings, path, tick)
        tick(len(part))
        for (at, n), loss in zip(part, losses.tolist(), strict=True):
            yield batch[at], n, loss


def _summed(
    model: GPT,
    before: Tensor,
    cache: KVCache,
    endings: Sequence[Sequence[int]],
    path: Path,
    tick: Callable[[int], None],
) -> Tensor:
    """Nats (R,) in float64 of endings whose contexts are in ``cache``; ``before`` (R, E) is the
    residual stream that predicts their first tokens. The last tokens are never fed."""
    targets, lengths = _padded(model, endings)
    parts, most = [before[:, None]], targets.shape[1] - 1
    size = 1 if path.token_by_token else max(1, most)
    for at in range(0, most, size):
        real = (lengths - 1 - at).clamp(0, size)
        parts.append(model.hidden(targets[:, at : at + size], cache=cache, lengths=real))
        tick(0)
    seen = torch.arange(most + 1, device=model.device) < lengths[:, None]
    losses = torch.zeros(targets.shape, dtype=torch.float64, device=model.device)
    found = token_losses(torch.cat(parts, 1)[seen], model.lm_head.weight, targets[seen])
    losses[seen] = found.double()
    return losses.sum(1)


def _padded(model: GPT, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids (rows, longest), zeros after each row's end, and the rows' lengths."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return tokens.to(model.device), lengths.to(model.device)
