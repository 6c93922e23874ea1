"""What a continuation scores: its log-likelihood, and whether greedy decoding says it.

P predicted tokens, E n_embd.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvlab.cache import PADDING, SHARED_PREFIX, TreePass
from kvlab.evaluate.forward_passes import pass_rows
from kvlab.evaluate.hellaswag_prompts import Continuations
from kvlab.model import GPT
from kvlab.model.loss import token_scores


@dataclass(frozen=True)
class ContinuationScore:
    """Of one continuation after its context.

    Attributes:
        nats: the sum of -log p of its tokens, in float64.
        is_greedy: whether each of its tokens was the likeliest.
    """

    nats: float
    is_greedy: bool


def sum_scores(
    model: GPT, hidden: Tensor, endings: Sequence[Sequence[int]]
) -> list[ContinuationScore]:
    """One score an ending.

    Args:
        hidden: (P, E), the residual stream that predicts the endings' tokens, one after another.
    """
    counts = torch.tensor([len(ending) for ending in endings])
    targets = torch.tensor([token for ending in endings for token in ending])
    losses, hits = token_scores(hidden, model.lm_head.weight, targets.to(model.device))
    sums = torch.zeros(2, len(endings), dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(endings)), counts)
    sums.index_add_(1, owner, torch.stack([losses.double(), hits.double()]).cpu())
    return [
        ContinuationScore(nats, hit == count)
        for nats, hit, count in zip(*sums.tolist(), counts.tolist(), strict=True)
    ]


# Continuations scored one-shot: a context and all that may follow it in one row of one pass.
#
# Every token is computed once: the context's K/V are those that all of its continuations see, and
# a mask keeps these apart (`kvlab.cache.tree_attention`). Rows of about equal length go together, so
# that little of a pass is padding, and logits exist only where a token is predicted.
#
# R rows, T tokens of the longest, P predicted tokens.


MAX_ROW_TOKENS = 1024
"""A context with more continuations than fit so many tokens is computed again for the rest."""

FULL_SPEED_TOKENS = 512
"""Passes of so many tokens are about as fast a token as larger ones, on CPU."""


@dataclass
class _PackedRow:
    """A context and some of its continuations, the last token of each left out: it is predicted,
    never fed."""

    branch: int
    endings: list[int] = field(default_factory=list)
    length: int = 0


def packed_scores(
    model: GPT, branches: Sequence[Continuations], tick: Callable[[int], None]
) -> Iterator[tuple[int, int, ContinuationScore]]:
    """Number of the branch, number of its ending, and its score; in any order.

    Args:
        tick: called after each pass with the number of endings that are newly done.
    """
    rows = sorted(_pack_rows(branches), key=lambda row: row.length)
    start = 0
    while start < len(rows):
        part = _select_pass(model, rows, start)
        start += len(part)
        yield from _score_pass(model, branches, part)
        tick(sum(len(row.endings) for row in part))


def _pack_rows(branches: Sequence[Continuations]) -> Iterator[_PackedRow]:
    for number, branch in enumerate(branches):
        row = _PackedRow(number, length=len(branch.context))
        for i, ending in enumerate(branch.endings):
            if row.endings and row.length + len(ending) - 1 > MAX_ROW_TOKENS:
                yield row
                row = _PackedRow(number, length=len(branch.context))
            row.endings.append(i)
            row.length += len(ending) - 1
        yield row


def _select_pass(model: GPT, rows: Sequence[_PackedRow], start: int) -> list[_PackedRow]:
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
def _score_pass(
    model: GPT, branches: Sequence[Continuations], rows: Sequence[_PackedRow]
) -> list[tuple[int, int, ContinuationScore]]:
    length = max(row.length for row in rows)
    tokens, positions, kinds = (torch.full((len(rows), length), fill) for fill in (0, 0, PADDING))
    predicting: list[Tensor] = []  # where in the pass, of each ending, its tokens are predicted
    targets: list[list[int]] = []
    for at, row in enumerate(rows):
        branch = branches[row.branch]
        used = len(branch.context)
        tokens[at, :used] = torch.tensor(branch.context)
        positions[at, :used] = torch.arange(used)
        kinds[at, :used] = SHARED_PREFIX
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
    hidden = _tree_hidden_states(model, tokens, positions, kinds, torch.cat(predicting))
    scores = iter(sum_scores(model, hidden, targets))
    return [(row.branch, i, next(scores)) for row in rows for i in row.endings]


def _tree_hidden_states(
    model: GPT, tokens: Tensor, positions: Tensor, kinds: Tensor, wanted: Tensor
) -> Tensor:
    """The residual stream (P, E) of the tokens ``wanted``, in rows (R, T) that branch."""
    config, device = model.config, model.device
    windows = [config.window if kind == "L" else None for kind in config.layer_kinds]
    places, parts = positions.to(device), kinds.to(device)
    step = TreePass(config.kv_owners, windows, places, parts, model.dtype)
    return model.run_pass(tokens.to(device), step, wanted.to(device))
