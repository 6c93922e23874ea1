"""Losses of tokens that a model can copy from the text that it has read.

Such a token stood behind the same token before in its window. Zoology (arXiv 2312.04927) calls
these associative recall hits. Ids below 2,000 are left out: a tokenizer merges the commonest first,
and pairs such as "of the" need no recall.
"""

import torch
import torch.nn.functional as F

from kvlab.extend import Extension, TokenMetric

RARE = 2000
NEAR = 64


def count_back(tokens):
    """Return how many tokens ago each target's pair was read last (N,); 0 if it was not."""
    read, last = tokens.windows[tokens.rows], tokens.positions[:, None]
    place = torch.arange(1, read.shape[1], device=last.device)
    is_pair = (read[:, :-1] == read.gather(1, last)) & (read[:, 1:] == tokens.targets[:, None])
    is_pair &= (place <= last) & (tokens.targets[:, None] >= RARE)
    return torch.where(is_pair, last + 1 - place, NEAR * read.shape[1]).amin(1) * is_pair.any(1)


def measure_loss(tokens):
    return F.cross_entropy(tokens.logits.float(), tokens.targets, reduction="none")


class NearPairLoss(TokenMetric):
    name = "near_pair_loss"
    title = "loss of rarer tokens whose pair was read within 64 tokens"
    unit = "nats/token"
    better = "lower"

    def score(self, tokens):
        back = count_back(tokens)
        return measure_loss(tokens), (back > 0) & (back <= NEAR)


class FarPairLoss(TokenMetric):
    name = "far_pair_loss"
    title = "loss of rarer tokens whose pair was read more than 64 tokens before"
    unit = "nats/token"
    better = "lower"

    def score(self, tokens):
        return measure_loss(tokens), count_back(tokens) > NEAR


extension = Extension(metrics=(NearPairLoss(), FarPairLoss()))
