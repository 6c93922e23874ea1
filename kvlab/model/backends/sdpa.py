"""torch's scaled dot-product attention, with the mask built from absolute positions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.cache import Documents


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Documents | None = None
) -> Tensor:
    """See `kvlab.model.backends`. Exact for any shape; a window saves nothing here."""
    queries, keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    plain = window is None or window >= keys
    if plain and queries == keys and documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    # is_causal would align the triangle top-left, at the first key
    window = None if plain else window
    if documents is None:
        mask = band(queries, keys, window, q.device)
    else:
        mask = documents.once(("sdpa", window), lambda: _parted(documents, keys, window))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def _parted(documents: Documents, count: int, window: int | None) -> Tensor:
    """(B, 1, count, count) of bool: which tokens each of them sees."""
    whole = slice(0, count)
    return band(count, count, window, documents.ids.device) & documents.together(whole, whole)


def band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """(queries, keys) of bool: which of the keys, ending with the last query, each query sees."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries - window + 1)
