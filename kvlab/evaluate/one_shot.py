"""Continuations scored one-shot: a context and all that may follow it in one row of one pass.

Every token is computed once: the context's K/V are those that all of its continuations see, and
a mask keeps these apart (`kvlab.cache.branched`). Rows of about equal length go together, so
that little of a pass is padding, and logits exist only where a token is predicted.

R rows, T tokens of the longest, P predicted tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvlab.cache import PADDING, TRUNK, Branched
from kvlab.evaluate.batching import pass_rows
from kvlab.evaluate.questions import Branches
from kvlab.evaluate.score import Score, summed_scores
from kvlab.model import GPT

ROW_TOKENS = 1024
"""A context with more continuations than fit so many tokens is computed again for the rest."""

FULL_SPEED_TOKENS = 512
"""Passes of so many tokens are about as fast a token as larger ones, on CPU."""


@dataclass
class _Row:
    """A context and some of its continuations, the last token of each left out: it is predicted,
    never fed."""

    branch: int
    endings: list[int] = field(default_factory=list)
    length: int = 0


def one_shot_scores(
    model: GPT, branches: Sequence[Branches], tick: Callable[[int], None]
) -> Iterator[tuple[int, int, Score]]:
    """Number of the branch, number of its ending, and its score; in any order.

    Args:
        tick: called after each pass with the number of endings that are newly done.
    """
    rows = sorted(_rows(branches), key=lambda row: row.length)
    start = 0
    while start < len(rows):
        part = _same_pass(model, rows, start)
        start += len(part)
        yield from _score(model, branches, part)
        tick(sum(len(row.endings) for row in part))


def _rows(branches: Sequence[Branches]) -> Iterator[_Row]:
    for number, branch in enumerate(branches):
        row = _Row(number, length=len(branch.context))
        for i, ending in enumerate(branch.endings):
            if row.endings and row.length + len(ending) - 1 > ROW_TOKENS:
                yield row
                row = _Row(number, length=len(branch.context))
            row.endings.append(i)
            row.length += len(ending) - 1
        yield row


def _same_pass(model: GPT, rows: Sequence[_Row], start: int) -> list[_Row]:
    """The rows from ``start`` on, sorted by length, that one pass takes, the longest deciding;
    no more once a pass that is large enough for speed would be padding to 3%."""
    end, real = start + 1, rows[start].length
    while end < len(rows) and end - start < pass_rows(model, rows[end].length):
        padded = (end - start + 1) * rows[end].length
        if real >= FULL_SPEED_TOKENS and padded > 1.03 * (real + rows[end].length):
            break
        real += rows[end].length
        end += 1
    return list(rows[start:end])


@torch.inference_mode()
def _score(
    model: GPT, branches: Sequence[Branches], rows: Sequence[_Row]
) -> list[tuple[int, int, Score]]:
    length = max(row.length for row in rows)
    tokens, positions, kinds = (torch.full((len(rows), length), fill) for fill in (0, 0, PADDING))
    predicting: list[Tensor] = []  # where in the pass, of each ending, its tokens are predicted
    targets: list[list[int]] = []
    for at, row in enumerate(rows):
        branch = branches[row.branch]
        used = len(branch.context)
        tokens[at, :used] = torch.tensor(branch.context)
        positions[at, :used] = torch.arange(used)
        kinds[at, :used] = TRUNK
        last = at * length + used - 1
        for n, i in enumerate(row.endings, start=1):
            ending = branch.endings[i]
            end = used + len(ending) - 1
            tokens[at, used:end] = torch.tensor(ending[:-1], dtype=torch.int64)
            positions[at, used:end] = len(branch.context) + torch.arange(end - used)
            kinds[at, used:end] = n
            predicting += [torch.tensor([last]), at * length + torch.arange(used, end)]
            targets.append(ending)
            used = end
    hidden = _hidden(model, tokens, positions, kinds, torch.cat(predicting))
    scores = iter(summed_scores(model, hidden, targets))
    return [(row.branch, i, next(scores)) for row in rows for i in row.endings]


def _hidden(model: GPT, tokens: Tensor, positions: Tensor, kinds: Tensor, wanted: Tensor) -> Tensor:
    """The residual stream (P, E) of the tokens ``wanted``, in rows (R, T) that branch."""
    config, device = model.config, model.device
    windows = [config.window if kind == "L" else None for kind in config.layer_kinds]
    places, parts = positions.to(device), kinds.to(device)
    step = Branched(config.kv_owners, windows, places, parts, model.dtype)
    return model.run(tokens.to(device), step, wanted.to(device))
