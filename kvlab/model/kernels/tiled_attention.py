"""Attention for training on CPU: large products, with the probabilities saved for backward.

torch's fused kernel saves memory by computing the probabilities again in its backward pass, in
small products that run far below a core's speed. With microbatches of a few thousand tokens the
memory is there. Queries go in tiles that read only the keys which any of them sees, so causality
and windows save work. bfloat16 is computed in float32, which a CPU without matrix tiles (AMX)
does faster than its fused kernel in bfloat16.

`kvlab.layout.cpu_attention_memory` has the shapes that this kernel serves and the bytes it saves.

Shapes: B rows, H heads, T tokens, D width of Q and K, Dv of V; N = B H.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvlab.cache import DocumentMask
from kvlab.layout.cpu_attention_memory import query_tiles, saved_probability_bytes
from kvlab.model.kernels.cpu_kernel import CPUKernel

Attend = Callable[[Tensor, Tensor, Tensor, int | None, DocumentMask | None], Tensor]

NARROW_HEAD_DIM = 32
"""Up to this D a sum of products is faster transposed, with rows of a tile's keys instead of D."""


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: DocumentMask | None = None
) -> Tensor:
    """Attend by the definition, over all pairs of as many queries as keys.

    Args:
        q: (B, H, T, D).
        k: (B, Hkv, T, D).
        v: (B, Hkv, T, Dv).
        window: tokens that each query sees, itself included; None for all before it.
        documents: no query sees a token of another document.

    Returns:
        (B, H, T, Dv).
    """
    length, repeats = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    index = torch.arange(length, device=q.device)
    distance = index[:, None] - index
    visible = (distance >= 0) & (distance < (window or length))
    if documents is not None:
        visible = visible & documents.same_document(slice(None), slice(None))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visible, -math.inf).softmax(-1) @ v


def _select_tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,  # noqa: ARG001  (the signature of the kernel)
    window: int | None,
    documents: DocumentMask | None = None,  # noqa: ARG001
) -> Attend | None:
    if q.device.type != "cpu" or not (torch.is_grad_enabled() and q.requires_grad):
        return None
    if torch.compiler.is_compiling() or q.dtype not in _supported_dtypes():
        return None
    rows, heads, length, head_dim = q.shape
    is_reduced = q.dtype == torch.bfloat16
    is_served = length == k.shape[2] and saved_probability_bytes(
        rows, heads, head_dim, length, window, is_bfloat16=is_reduced
    )
    return attend_tiled if is_served else None


tiled_attention = CPUKernel(attend_plain, _select_tiled)
"""`attend_plain`; the fast implementation is differentiable once."""


def attend_tiled(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: DocumentMask | None = None
) -> Tensor:
    """Attend in tiles of queries; see `attend_plain`. Differentiable once."""
    assert q.shape[2] == k.shape[2], "only for a whole pass without a past"
    dtype, repeats = q.dtype, q.shape[1] // k.shape[1]
    if dtype == torch.bfloat16:
        q, k, v = q.float(), k.float(), v.float()
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    with torch.autocast("cpu", enabled=False):
        out: Tensor = _TiledAttention.apply(q, k, v, window, documents)  # type: ignore[no-untyped-call]
    return out.to(dtype)


@lru_cache(maxsize=1)
def _supported_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes that are faster here than by the fused kernel."""
    has_amx = torch.cpu._is_amx_tile_supported()
    return (torch.float32,) if has_amx else (torch.float32, torch.bfloat16)


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
        out = _empty_token_major(q, v.shape[-1])
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q * ctx.scale, k, v))
        probabilities = []
        for start, end, low in query_tiles(q.shape[1], window):
            scores = torch.bmm(q[:, start:end], k[:, low:end].transpose(1, 2))
            _mask_scores(scores, start, low, window)
            if documents is not None:
                is_visible = documents.same_document(slice(start, end), slice(low, end))
                scores.view(*ctx.shape[:2], *scores.shape[1:]).masked_fill_(~is_visible, -math.inf)
            probabilities.append(torch.softmax(scores, -1, out=scores))
            tile = torch.bmm(probabilities[-1], v[:, low:end])
            out[:, :, start:end] = tile.view(*ctx.shape[:2], *tile.shape[1:])
        ctx.save_for_backward(q, k, v, *probabilities)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, *probabilities = ctx.saved_tensors
        dq = _empty_token_major(grad_output, q.shape[-1])
        dk, dv = _zero_gradient(k), _zero_gradient(v)
        grad_output = grad_output.reshape(v.shape)
        tiles = query_tiles(q.shape[1], ctx.window)
        for (start, end, low), p in zip(tiles, probabilities, strict=True):
            grad_tile = grad_output[:, start:end]
            _accumulate_product(dv[:, low:end], p, grad_tile)
            ds = torch.bmm(grad_tile, v[:, low:end].transpose(1, 2))
            torch.ops.aten._softmax_backward_data.out(ds, p, -1, ds.dtype, grad_input=ds)
            tile = torch.bmm(ds, k[:, low:end]).mul_(ctx.scale)
            dq[:, :, start:end] = tile.view(*ctx.shape[:2], *tile.shape[1:])
            _accumulate_product(dk[:, low:end], ds, q[:, start:end])
        heads = ctx.shape[:2]
        return dq, dk.view(*heads, *dk.shape[1:]), dv.view(*heads, *dv.shape[1:]), None, None


def _empty_token_major(like: Tensor, width: int) -> Tensor:
    """Return (B, H, T, width) for ``like`` (B, H, T, D), with the heads of a token side by side, as
    the projections have them."""
    rows, heads, length, _ = like.shape
    return like.new_empty(rows, length, heads, width).transpose(1, 2)


def _zero_gradient(like: Tensor) -> Tensor:
    """Return zeros (N, T, D), laid out for `_accumulate_product`."""
    count, length, head_dim = like.shape
    if head_dim <= NARROW_HEAD_DIM:
        return like.new_zeros(count, head_dim, length).transpose(1, 2)
    return torch.zeros_like(like)


def _accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add (N, C, K) transposed times (N, C, D) to (N, K, D)."""
    if right.shape[2] <= NARROW_HEAD_DIM:
        total += torch.bmm(right.transpose(1, 2), left).transpose(1, 2)
    else:
        total.baddbmm_(left.transpose(1, 2), right)


def _mask_scores(scores: Tensor, start: int, low: int, window: int | None) -> None:
    """Add -inf where a query does not see a key: only corners of a tile hold such pairs."""
    count = scores.shape[1]
    scores[..., -count:] += _corner_mask(count, 1, True, scores.dtype)
    if window is None:
        return
    spare = low - (start - window + 1)  # keys that the first query would see before the first
    if count - 1 > spare:
        scores[..., :count] += _corner_mask(count, -1 - spare, False, scores.dtype)


@lru_cache(maxsize=64)
def _corner_mask(count: int, diagonal: int, is_upper: bool, dtype: torch.dtype) -> Tensor:
    full = torch.full((count, count), -math.inf, dtype=dtype)
    return full.triu(diagonal) if is_upper else full.tril(diagonal)
