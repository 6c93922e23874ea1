"""The KV cache, built from a layout. It knows layers and tokens, no model."""

from kvlab.cache.attention_pass import AttentionPass, DocumentMask, KVContext
from kvlab.cache.formats import Numbers, Rotated, ScaledCodes, Stored
from kvlab.cache.kv_cache import KVCache
from kvlab.cache.uncached_passes import begin_one_shot_pass, make_rounding

__all__ = [
    "AttentionPass",
    "DocumentMask",
    "KVCache",
    "KVContext",
    "Numbers",
    "Rotated",
    "ScaledCodes",
    "Stored",
    "begin_one_shot_pass",
    "make_rounding",
]
