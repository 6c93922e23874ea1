"""torch's scaled dot-product attention, with the mask built from absolute positions."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from kvlab.cache import DocumentMask
from kvlab.model.kernels import tiled_attention


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: DocumentMask | None = None
) -> Tensor:
    """See `kvlab.model.attention_backends`. Exact for any shape; a window saves nothing here."""
    queries, keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    plain = window is None or window >= keys
    if plain and queries == keys and documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    # is_causal would align the triangle top-left, at the first key
    window = None if plain else window
    if documents is None:
        mask = band_mask(queries, keys, window, q.device)
    else:
        mask = documents.once(
            ("sdpa", window), lambda: _document_band_mask(documents, keys, window)
        )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def _document_band_mask(documents: DocumentMask, count: int, window: int | None) -> Tensor:
    """(B, 1, count, count) of bool: which tokens each of them sees."""
    whole = slice(0, count)
    return band_mask(count, count, window, documents.ids.device) & documents.together(whole, whole)


def band_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """(queries, keys) of bool: which of the keys, ending with the last query, each query sees."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries - window + 1)


# Sliding windows in blocks: exact, differentiable, and cheaper than the full square.
#
# A block of Q queries reads only the Q + window - 1 keys that any of them can see, so the work
# is tokens x (Q + window), not tokens squared. A loop over blocks beats one batched call on CPU:
# measured forward and backward at 1,024 tokens and a window of 256, 12 heads of 64, batch 4:
# 287 ms against 323 ms batched and 445 ms for the full causal square.


MIN_QUERY_BLOCK = 64


def attend_windowed_blocks(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: DocumentMask | None = None
) -> Tensor:
    """See `kvlab.model.attention_backends`."""
    assert window is not None, "an unbounded window has no blocks"
    queries, past = q.shape[2], k.shape[2] - q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    size = max(window, MIN_QUERY_BLOCK)
    masks: dict[tuple[int, int], Tensor] = {}  # all inner blocks share one
    parts = []
    for start in range(0, queries, size):
        end = min(start + size, queries)
        low, high = max(0, past + start - window + 1), past + end
        shape = (end - start, high - low)
        if shape not in masks:
            masks[shape] = band_mask(*shape, window, q.device)
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


# FlexAttention: windows compiled into one block-sparse kernel, forward and backward, on CUDA.
#
# On the CPU it has no backward pass (torch 2.13), so it serves there only to be compared with.
#
# A compiled model takes kernel and mask into its own graph, where a mask is a small kernel of each
# pass; otherwise the kernel is compiled alone, and a mask made once for each shape.


FLEX_BLOCK = 128


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: DocumentMask | None = None
) -> Tensor:
    """See `kvlab.model.attention_backends`."""
    queries, keys = q.shape[2], k.shape[2]
    window = window or keys
    inside = torch.compiler.is_compiling()
    if documents is not None:
        mask = documents.once(("flex", window), lambda: _document_block_mask(documents, window))
    elif inside:
        mask = _block_mask(queries, keys, window, q.device)
    else:
        mask = _cached_block_mask(queries, keys, window, q.device)
    grouped = q.shape[1] != k.shape[1]
    kernel = flex_attention if inside or q.device.type != "cuda" else _compiled_flex()
    out: Tensor = kernel(q, k, v, block_mask=mask, enable_gqa=grouped)
    return out


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=64)
def _cached_block_mask(queries: int, keys: int, window: int, device: torch.device) -> BlockMask:
    return _block_mask(queries, keys, window, device)


def _block_mask(queries: int, keys: int, window: int, device: torch.device) -> BlockMask:
    past = keys - queries

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + past - key
        return (distance >= 0) & (distance < window)

    return create_block_mask(
        sees, None, None, queries, keys, device=str(device), BLOCK_SIZE=FLEX_BLOCK
    )


def _document_block_mask(documents: DocumentMask, window: int) -> BlockMask:
    """Depends on the text, so it is made for each forward pass, once for all of its layers."""
    ids = documents.ids
    rows, count = ids.shape

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query - key
        near = (distance >= 0) & (distance < window)
        return near & (ids[row, query] == ids[row, key])

    return create_block_mask(sees, rows, None, count, count, device=str(ids.device),
                             BLOCK_SIZE=FLEX_BLOCK)  # fmt: skip


# The attention backends and the rule that picks one.
#
# A backend attends C queries to P + C consecutive keys that end with the last query, each query
# seeing itself and the ``window - 1`` tokens before it (all of them if ``window`` is None), but
# none of another document if ``documents`` part the row (P is 0 then):
#
#     backend(q (B, H, C, D), k (B, Hkv, P + C, D), v, window, documents) -> (B, H, C, D)


Backend = Callable[[Tensor, Tensor, Tensor, int | None, DocumentMask | None], Tensor]

BACKENDS: dict[str, Backend] = {
    "sdpa": attend_sdpa,
    "blocked": attend_windowed_blocks,
    "flex": attend_flex,
    "kept": tiled_attention.attend_cpu_tiled,
}


def select_backend(q: Tensor, keys: int, window: int | None, has_documents: bool = False) -> str:
    """The name of the backend for queries (B, H, C, D) on so many keys: no window or a wide one
    is a plain triangle, unless documents part it."""
    if tiled_attention.supports(q, keys, window):
        return "kept"
    is_wide = window is None or window >= keys
    if q.device.type == "cuda" and q.shape[2] == keys and (has_documents or not is_wide):
        return "flex"
    return "sdpa" if is_wide else "blocked"
