"""What a continuation scores: its log-likelihood, and whether greedy decoding says it.

P predicted tokens, E n_embd.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.model import GPT
from kvlab.model.loss import token_scores


@dataclass(frozen=True)
class Score:
    """Of one continuation after its context.

    Attributes:
        nats: the sum of -log p of its tokens, in float64.
        is_greedy: whether each of its tokens was the likeliest.
    """

    nats: float
    is_greedy: bool


def summed_scores(model: GPT, hidden: Tensor, endings: Sequence[Sequence[int]]) -> list[Score]:
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
        Score(nats, hit == count)
        for nats, hit, count in zip(*sums.tolist(), counts.tolist(), strict=True)
    ]
