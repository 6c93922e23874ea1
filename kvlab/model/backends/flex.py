"""FlexAttention: windows compiled into one block-sparse kernel, forward and backward, on CUDA.

On the CPU it has no backward pass (torch 2.13), so it serves there only to be compared with.

A compiled model takes kernel and mask into its own graph, where a mask is a small kernel of each
pass; otherwise the kernel is compiled alone, and a mask made once for each shape.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from kvlab.cache import Documents

BLOCK = 128


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Documents | None = None
) -> Tensor:
    """See `kvlab.model.backends`."""
    queries, keys = q.shape[2], k.shape[2]
    window = window or keys
    inside = torch.compiler.is_compiling()
    if documents is not None:
        mask = documents.once(("flex", window), lambda: _parted(documents, window))
    elif inside:
        mask = _block_mask(queries, keys, window, q.device)
    else:
        mask = _kept_mask(queries, keys, window, q.device)
    grouped = q.shape[1] != k.shape[1]
    kernel = flex_attention if inside or q.device.type != "cuda" else _compiled()
    out: Tensor = kernel(q, k, v, block_mask=mask, enable_gqa=grouped)
    return out


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=64)
def _kept_mask(queries: int, keys: int, window: int, device: torch.device) -> BlockMask:
    return _block_mask(queries, keys, window, device)


def _block_mask(queries: int, keys: int, window: int, device: torch.device) -> BlockMask:
    past = keys - queries

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + past - key
        return (distance >= 0) & (distance < window)

    return create_block_mask(sees, None, None, queries, keys, device=str(device), BLOCK_SIZE=BLOCK)


def _parted(documents: Documents, window: int) -> BlockMask:
    """Depends on the text, so it is made for each forward pass, once for all of its layers."""
    ids = documents.ids
    rows, count = ids.shape

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query - key
        near = (distance >= 0) & (distance < window)
        return near & (ids[row, query] == ids[row, key])

    return create_block_mask(sees, rows, None, count, count, device=str(ids.device),
                             BLOCK_SIZE=BLOCK)  # fmt: skip
