"""Contexts with continuations, and the log-likelihood scores of these.

Shapes: P predicted tokens, E n_embd.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.model import GPT
from kvlab.model.loss import token_scores


@dataclass(frozen=True)
class Continuations:
    """A context that is computed once, and its continuations; token ids, never empty."""

    context: list[int]
    endings: list[list[int]]


@dataclass(frozen=True)
class ContinuationScore:
    """Score of one continuation after its context.

    Attributes:
        nats: the sum of -log p of its tokens, in float64.
        is_greedy: whether each of its tokens is the most likely one.
    """

    nats: float
    is_greedy: bool


def fit_to_block(
    context: list[int], ending: list[int], block_size: int
) -> tuple[list[int], list[int]]:
    """Return the last ``block_size + 1`` tokens of a context and its ending, still in two parts.

    The last token is predicted and never fed, so this is what fits in the model.
    """
    tokens = (context + ending)[-(block_size + 1) :]
    scored = min(len(ending), len(tokens) - 1)
    return tokens[:-scored], tokens[-scored:]


def sum_scores(
    model: GPT, hidden_states: Tensor, endings: Sequence[Sequence[int]]
) -> list[ContinuationScore]:
    """Return one score per ending.

    Args:
        hidden_states: (P, E), the residual stream that predicts the endings' tokens, concatenated.
    """
    counts = torch.tensor([len(ending) for ending in endings])
    targets = torch.tensor([token for ending in endings for token in ending])
    losses, hits = token_scores(hidden_states, model.lm_head.weight, targets.to(model.device))
    sums = torch.zeros(2, len(endings), dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(len(endings)), counts)
    sums.index_add_(1, owner, torch.stack([losses.double(), hits.double()]).cpu())
    return [
        ContinuationScore(nats, hit == count)
        for nats, hit, count in zip(*sums.tolist(), counts.tolist(), strict=True)
    ]
