"""The KV cache, built from a layout. It knows layers and tokens, no model."""

from kvlab.cache.attention_pass import AttentionPass, KVContext, OneShotPass
from kvlab.cache.document_mask import DocumentMask
from kvlab.cache.formats import ScaledCodes, Stored
from kvlab.cache.kv_cache import KVCache
from kvlab.cache.prefix_cache import PrefixCache
from kvlab.cache.trained_storage import begin_one_shot_pass, make_rounding
from kvlab.cache.tree_attention import PADDING, SHARED_PREFIX, TreePass

__all__ = [
    "PADDING",
    "SHARED_PREFIX",
    "AttentionPass",
    "DocumentMask",
    "KVCache",
    "KVContext",
    "OneShotPass",
    "PrefixCache",
    "ScaledCodes",
    "Stored",
    "TreePass",
    "begin_one_shot_pass",
    "make_rounding",
]
