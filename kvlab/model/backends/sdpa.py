"""torch's scaled dot-product attention, with the mask built from absolute positions."""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """See `kvlab.model.backends`. Exact for any shape; a window saves nothing here."""
    queries, keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    plain = window is None or window >= keys
    if plain and queries == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    # is_causal would align the triangle top-left, at the first key
    mask = band(queries, keys, None if plain else window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """(queries, keys) of bool: which of the keys, ending with the last query, each query sees."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries - window + 1)
