"""The KV cache, built from a layout. It knows layers and tokens, no model."""

from kvlab.cache.branched import PADDING, TRUNK, Branched
from kvlab.cache.documents import Documents
from kvlab.cache.kv_cache import KVCache
from kvlab.cache.step import KeysValues, OneShot, Step

__all__ = [
    "PADDING",
    "TRUNK",
    "Branched",
    "Documents",
    "KVCache",
    "KeysValues",
    "OneShot",
    "Step",
]
