"""A policy of eviction: the token goes that the newest query attended to least.

It is that of TOVA (arXiv 2401.06104).
"""

from kvlab.extend import EvictionPolicy, Extension


class LastAttention(EvictionPolicy):
    name = "last_attention"  # a value of serving.evict.by

    def rank(self, scores, step):
        return step.attention.mean(2)


extension = Extension(eviction_policies=(LastAttention(),))
