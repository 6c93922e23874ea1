"""Score continuations one-shot: a context and all that may follow it in one row of one pass.

Every token is computed once. All continuations of a context see its K/V, and a mask separates
them from each other (`kvlab.cache.tree_attention`). Rows of similar length share a pass, so that
little of it is padding, and logits are computed only where a token is predicted.

A model that is trained with K/V in blocks (KIVI) has each continuation in a row of its own: which
tokens are rounded there depends on how many follow.

Shapes: R rows, T tokens of the longest, P predicted tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvlab.cache import PADDING, SHARED_PREFIX, TreePass, make_rounding
from kvlab.evaluate.continuations import Continuations, ContinuationScore, sum_scores
from kvlab.evaluate.forward_passes import OnCount, pass_rows
from kvlab.model import GPT

MAX_ROW_TOKENS = 1024
"""A context whose continuations exceed this is computed again for the rest of them."""

FULL_SPEED_TOKENS = 512
"""Passes of this many tokens are about as fast per token as larger ones, on CPU."""

MAX_PADDING = 1.03
"""The most tokens of a pass, as a multiple of its real ones, beyond `FULL_SPEED_TOKENS`."""


@dataclass
class _PackedRow:
    """A context and some of its continuations without their last tokens, which are predicted and
    never fed.

    Attributes:
        group: number of the context.
        endings: numbers of the continuations.
        length: tokens of the row.
    """

    group: int
    endings: list[int] = field(default_factory=list)
    length: int = 0


def score_packed(
    model: GPT, groups: Sequence[Continuations], on_progress: OnCount
) -> Iterator[tuple[int, int, ContinuationScore]]:
    """Yield the number of the group, the number of its ending and the score, in any order.

    Args:
        on_progress: called after each pass with the number of endings that are newly done.
    """
    row_tokens = MAX_ROW_TOKENS if model.trained_kv.blocks is None else 0
    rows = sorted(_pack_rows(groups, row_tokens), key=lambda row: row.length)
    start = 0
    while start < len(rows):
        batch = _select_pass(model, rows, start)
        start += len(batch)
        yield from _score_pass(model, groups, batch)
        on_progress(sum(len(row.endings) for row in batch))


def _pack_rows(groups: Sequence[Continuations], row_tokens: int) -> Iterator[_PackedRow]:
    for number, group in enumerate(groups):
        row = _PackedRow(number, length=len(group.context))
        for i, ending in enumerate(group.endings):
            if row.endings and row.length + len(ending) - 1 > row_tokens:
                yield row
                row = _PackedRow(number, length=len(group.context))
            row.endings.append(i)
            row.length += len(ending) - 1
        yield row


def _select_pass(model: GPT, rows: Sequence[_PackedRow], start: int) -> list[_PackedRow]:
    """Return the rows from ``start`` on, sorted by length, that share one pass.

    It ends when the longest row leaves no room for another, or when the pass is large enough to
    be fast and another row would add padding.
    """
    end, real = start + 1, rows[start].length
    while end < len(rows) and end - start < pass_rows(model, rows[end].length):
        padded = (end - start + 1) * rows[end].length
        if real >= FULL_SPEED_TOKENS and padded > MAX_PADDING * (real + rows[end].length):
            break
        real += rows[end].length
        end += 1
    return list(rows[start:end])


@torch.inference_mode()
def _score_pass(
    model: GPT, groups: Sequence[Continuations], rows: Sequence[_PackedRow]
) -> list[tuple[int, int, ContinuationScore]]:
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
    hidden_states = _tree_hidden_states(model, tokens, positions, branches, torch.cat(predicting))
    scores = iter(sum_scores(model, hidden_states, targets))
    return [(row.group, i, next(scores)) for row in rows for i in row.endings]


def _tree_hidden_states(
    model: GPT, tokens: Tensor, positions: Tensor, branches: Tensor, token_indices: Tensor
) -> Tensor:
    """Return the residual stream (P, E) at ``token_indices`` of rows (R, T) that branch."""
    config, device = model.config, model.device
    if model.trained_kv.blocks is not None:  # one continuation a row, and padding at its end
        return model.hidden_states(tokens.to(device), token_indices=token_indices.to(device))
    tree = TreePass(
        config.kv_owners,
        config.layers,
        positions.to(device),
        branches.to(device),
        model.dtype,
        make_rounding(model.trained_kv),
    )
    return model.run_pass(tokens.to(device), tree, token_indices.to(device))
