"""Sliding windows in blocks: exact, differentiable, and cheaper than the full square.

A block of Q queries reads only the Q + window - 1 keys that any of them can see, so the work
is tokens x (Q + window), not tokens squared. A loop over blocks beats one batched call on CPU:
measured forward and backward at 1,024 tokens and a window of 256, 12 heads of 64, batch 4:
287 ms against 323 ms batched and 445 ms for the full causal square.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.cache import Documents
from kvlab.model.backends.sdpa import band

SMALLEST_BLOCK = 64


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Documents | None = None
) -> Tensor:
    """See `kvlab.model.backends`."""
    assert window is not None, "an unbounded window has no blocks"
    queries, past = q.shape[2], k.shape[2] - q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    size = max(window, SMALLEST_BLOCK)
    masks: dict[tuple[int, int], Tensor] = {}  # all inner blocks share one
    parts = []
    for start in range(0, queries, size):
        end = min(start + size, queries)
        low, high = max(0, past + start - window + 1), past + end
        shape = (end - start, high - low)
        if shape not in masks:
            masks[shape] = band(*shape, window, q.device)
        mask = masks[shape]
        if documents is not None:
            mask = mask & documents.together(slice(start, end), slice(low, high))
        part = F.scaled_dot_product_attention(
            q[:, :, start:end],
            k[:, :, low:high],
            v[:, :, low:high],
            attn_mask=mask,
            enable_gqa=grouped,
        )
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
