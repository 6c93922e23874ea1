"""Policies that reduce a prompt at its end (`serving.evict.prompt`), beside kvlab's `snapkv`."""

import torch.nn.functional as F

from kvlab.extend import EvictionPolicy, Extension


class Newest(EvictionPolicy):
    """The newest tokens, after the first ones (StreamingLLM, arXiv 2309.17453)."""

    name = "newest"

    def rank(self, _scores, step):
        return step.positions.float()


class DistinctKeys(EvictionPolicy):
    """The tokens whose keys are least like the mean direction of keys (KeyDiff, arXiv 2504.15364).

    It reads no query, so that what it keeps does not depend on what is asked.
    """

    name = "distinct_keys"

    def rank(self, _scores, step):
        directions = F.normalize(step.keys.double(), dim=-1)
        seen = directions.masked_fill(~step.is_kept[..., None], 0.0)
        return -F.cosine_similarity(directions, seen.sum(2, keepdim=True), dim=-1)


extension = Extension(eviction_policies=(Newest(), DistinctKeys()))
