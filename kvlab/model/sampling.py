"""Choosing the next token from logits (B, V), on their own device, without synchronising."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to choose. ``temperature`` 0 is greedy; ``top_k`` and ``top_p`` (nucleus, arXiv
    1904.09751) cut the distribution first, in this order.

    Raises:
        ValueError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature = {self.temperature} is below 0; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k} is below 1; leave it out to keep all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p} is not above 0 and at most 1")


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """One token a row: logits (B, V) -> (B,) of int64."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = _nucleus(logits, sampling.top_p)
    # the largest of p / Exp(1) draws from p; unlike multinomial it does not look at the sum
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits.softmax(-1) / noise).argmax(-1)


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest tokens whose probabilities reach ``top_p``, at least one."""
    ordered, index = logits.sort(-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= top_p)
    return logits.masked_fill(dropped, -torch.inf)
