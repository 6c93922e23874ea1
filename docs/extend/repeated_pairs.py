"""A metric: the loss of tokens that a model can copy from the text that it has read.

Such a token stood behind the same token before in its window. Zoology (arXiv 2312.04927) calls
these associative recall hits: most of the loss by which models differ is theirs.
"""

import torch
import torch.nn.functional as F

from kvlab.extend import Extension, TokenMetric


class RepeatedPairLoss(TokenMetric):
    name = "repeated_pair_loss"
    title = "loss of tokens whose pair was read before"
    unit = "nats/token"
    better = "lower"

    def score(self, tokens):
        read, last = tokens.windows[tokens.rows], tokens.positions[:, None]
        follows = torch.arange(1, read.shape[1], device=last.device) <= last  # is read, too
        is_pair = (read[:, :-1] == read.gather(1, last)) & (read[:, 1:] == tokens.targets[:, None])
        loss = F.cross_entropy(tokens.logits.float(), tokens.targets, reduction="none")
        return loss, (is_pair & follows).any(1)


extension = Extension(metrics=(RepeatedPairLoss(),))
