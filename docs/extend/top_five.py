"""A metric: how often the right token is among the five likeliest."""

from kvlab.extend import Extension, TokenMetric


class TopFive(TokenMetric):
    name = "top_five"
    title = "right token among the five likeliest"
    unit = ""  # a share
    better = "higher"

    def score(self, tokens):
        return (tokens.logits.topk(5).indices == tokens.targets[:, None]).any(1)


extension = Extension(metrics=(TopFive(),))
