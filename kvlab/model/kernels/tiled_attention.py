"""Attention for training on CPU: large products, and the probabilities kept for the backward pass.

torch's fused kernel saves memory by computing the probabilities again in its backward pass,
whose small products are far from a core's speed. With microbatches of some thousand tokens the
memory is there. Queries go in tiles that read only the keys which any of them sees, so causality
and windows save work. Measured on one core, forward and backward, one row of 1,024 tokens, 12
heads of 64: 98 ms against 123 ms for the fused kernel; with a window of 256, 54 ms against 84 ms
in blocks of the fused kernel; four rows of 256 tokens, 4 heads of 16: 4.4 ms against 5.1 ms. In
tiles of 128 these take 103, 62 and 4.9 ms.

bfloat16 is computed in float32, which a CPU without tiles (AMX) does faster than its fused kernel
in bfloat16. On one core, fused and this: four rows of 256 tokens, 4 heads of 16: 8.7 and 5.3 ms;
two rows of 512, 4 heads of 80: 33 and 21 ms; one row of 1,024, 12 heads of 64: 101 and 89 ms, and
with a window of 256 in blocks of the fused kernel 83, here 49 ms; but one row of 2,048 without
a window, 8 heads of 64: 220 and 232 ms.

B rows, H heads, T tokens, D head_dim; N = B H.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvlab.cache import DocumentMask
from kvlab.layout.cpu_attention_memory import query_tiles, saved_probability_bytes

NARROW_HEAD_DIM = 32
"""Widths D up to which a sum of products is faster transposed, with rows of a tile's keys instead
of D: on two cores for eight rows of 256 tokens, 4 heads of 16, all of it 7.1 instead of 7.5 ms;
but with 12 heads of 64 and 1,024 tokens 65 instead of 57 ms."""


def supports(q: Tensor, keys: int, window: int | None) -> bool:
    """Whether this backend is the fastest for queries (B, H, C, D) of a training on CPU."""
    if q.device.type != "cpu" or not (torch.is_grad_enabled() and q.requires_grad):
        return False
    if torch.compiler.is_compiling() or q.dtype not in _supported_dtypes():
        return False
    rows, heads, queries, head_dim = q.shape
    reduced = q.dtype == torch.bfloat16
    return queries == keys and bool(
        saved_probability_bytes(rows, heads, head_dim, queries, window, reduced=reduced)
    )


def attend_cpu_tiled(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: DocumentMask | None = None
) -> Tensor:
    """See `kvlab.model.attention_backends`; as many queries as keys. Differentiable once."""
    assert q.shape[2] == k.shape[2], "only for a whole pass without a past"
    dtype, repeat = q.dtype, q.shape[1] // k.shape[1]
    if dtype == torch.bfloat16:
        q, k, v = q.float(), k.float(), v.float()
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    with torch.autocast("cpu", enabled=False):
        out: Tensor = _TiledAttention.apply(q, k, v, window, documents)  # type: ignore[no-untyped-call]
    return out.to(dtype)


@lru_cache(maxsize=1)
def _supported_dtypes() -> tuple[torch.dtype, ...]:
    """What is faster here than by the fused kernel."""
    has_tiles = torch.cpu._is_amx_tile_supported()
    return (torch.float32,) if has_tiles else (torch.float32, torch.bfloat16)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        documents: DocumentMask | None,
    ) -> Tensor:
        ctx.window, ctx.shape = window, q.shape
        ctx.scale = 1 / math.sqrt(q.shape[-1])
        out = _empty_token_major(q)
        q, k, v = (x.reshape(-1, *q.shape[2:]) for x in (q * ctx.scale, k, v))
        kept = []
        for start, end, low in query_tiles(q.shape[1], window):
            scores = torch.bmm(q[:, start:end], k[:, low:end].transpose(1, 2))
            _mask_scores(scores, start, low, window)
            if documents is not None:
                together = documents.together(slice(start, end), slice(low, end))
                scores.view(*ctx.shape[:2], *scores.shape[1:]).masked_fill_(~together, -math.inf)
            kept.append(torch.softmax(scores, -1, out=scores))
            tile = torch.bmm(kept[-1], v[:, low:end])
            out[:, :, start:end] = tile.view(*ctx.shape[:2], *tile.shape[1:])
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, *kept = ctx.saved_tensors
        dq, dk, dv = _empty_token_major(outer), _zero_gradient(k), _zero_gradient(v)
        outer = outer.reshape(q.shape)
        for (start, end, low), p in zip(query_tiles(q.shape[1], ctx.window), kept, strict=True):
            part = outer[:, start:end]
            _accumulate_product(dv[:, low:end], p, part)
            ds = torch.bmm(part, v[:, low:end].transpose(1, 2))
            torch.ops.aten._softmax_backward_data.out(ds, p, -1, ds.dtype, grad_input=ds)
            tile = torch.bmm(ds, k[:, low:end]).mul_(ctx.scale)
            dq[:, :, start:end] = tile.view(*ctx.shape[:2], *tile.shape[1:])
            _accumulate_product(dk[:, low:end], ds, q[:, start:end])
        return dq, dk.view(ctx.shape), dv.view(ctx.shape), None, None


def _empty_token_major(like: Tensor) -> Tensor:
    """(B, H, T, D) with the heads of a token side by side, as the projections have them."""
    rows, heads, length, width = like.shape
    return like.new_empty(rows, length, heads, width).transpose(1, 2)


def _zero_gradient(like: Tensor) -> Tensor:
    """(N, T, D) for `_add_product`."""
    count, length, width = like.shape
    if width <= NARROW_HEAD_DIM:
        return like.new_zeros(count, width, length).transpose(1, 2)
    return torch.zeros_like(like)


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds (N, C, K) transposed by (N, C, D) to (N, K, D)."""
    if right.shape[2] <= NARROW_HEAD_DIM:
        total += torch.bmm(right.transpose(1, 2), left).transpose(1, 2)
    else:
        total.baddbmm_(left.transpose(1, 2), right)


def _mask_scores(scores: Tensor, start: int, low: int, window: int | None) -> None:
    """Adds -inf where a query does not see a key: only corners of a tile hold such pairs."""
    count = scores.shape[1]
    scores[..., -count:] += _corner_mask(count, 1, True, scores.dtype)
    if window is None:
        return
    spare = low - (start - window + 1)  # keys that the first query would see before the first
    if count - 1 > spare:
        scores[..., :count] += _corner_mask(count, -1 - spare, False, scores.dtype)


@lru_cache(maxsize=64)
def _corner_mask(count: int, diagonal: int, upper: bool, dtype: torch.dtype) -> Tensor:
    full = torch.full((count, count), -math.inf, dtype=dtype)
    return full.triu(diagonal) if upper else full.tril(diagonal)
