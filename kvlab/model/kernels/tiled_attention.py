# ruff: noqa: ARG001 (not every kernel is selected by all of its arguments)
"""Attention for training on CPU: large products, with the probabilities saved for backward.

torch's fused kernel saves memory by computing the probabilities again in its backward pass, in
small products that run far below a core's speed. With microbatches of a few thousand tokens the
memory is there. Queries go in tiles that read only the keys which any of them sees, so causality
and windows save work. bfloat16 is computed in float32, which a CPU without matrix tiles (AMX)
does faster than its fused kernel in bfloat16.

`kvlab.layout.training_memory` has the shapes that this kernel serves and the bytes it saves.

Shapes: B rows, H heads, T tokens, D width of Q and K, Dv of V; N = B H.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvlab.cache.attention_pass import softmax_with_sink
from kvlab.layout.training_memory import find_tile_window, query_tiles, saved_probability_bytes
from kvlab.model.causal_mask import CausalMask
from kvlab.model.kernels.cpu_kernel import CPUKernel

Attend = Callable[..., Tensor]
"""Takes the arguments of `attend_plain`."""

NARROW_HEAD_DIM = 32
"""Up to this D a sum of products is faster transposed, with rows of a tile's keys instead of D."""


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, sink: Tensor | None = None
) -> Tensor:
    """Attend by the definition, over all pairs of as many queries as keys.

    Args:
        q: (B, H, T, D).
        k: (B, Hkv, T, D).
        v: (B, Hkv, T, Dv).
        mask: which keys each query sees.
        sink: (H,) a logit of each head that joins the denominator of its softmax; None: none does.

    Returns:
        (B, H, T, Dv).
    """
    length, repeats = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    visible = mask.to_dense(slice(0, length), q.device)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible, -math.inf)
    return softmax_with_sink(scores, sink).to(v.dtype) @ v


def _select_tiled(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, sink: Tensor | None = None
) -> Attend | None:
    if q.device.type != "cpu" or not (torch.is_grad_enabled() and q.requires_grad):
        return None
    if torch.compiler.is_compiling() or q.dtype not in _supported_dtypes():
        return None
    rows, heads, length, head_dim = q.shape
    shape = rows, heads, head_dim, length, _find_tile_window(mask), mask.sink_tokens
    is_served = length == k.shape[2] and saved_probability_bytes(
        *shape, is_bfloat16=q.dtype == torch.bfloat16, has_sink=sink is not None
    )
    return attend_tiled if is_served else None


def _find_tile_window(mask: CausalMask) -> int | None:
    has_documents = mask.documents is not None
    return find_tile_window(mask.window, mask.sink_tokens, has_documents=has_documents)


tiled_attention = CPUKernel("tiled_attention", attend_plain, _select_tiled)
"""`attend_plain`; the fast implementation is differentiable once."""


def attend_tiled(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, sink: Tensor | None = None
) -> Tensor:
    """Attend in tiles of queries; see `attend_plain`. Differentiable once."""
    assert q.shape[2] == k.shape[2], "only for a whole pass without a past"
    dtype, repeats = q.dtype, q.shape[1] // k.shape[1]
    if dtype == torch.bfloat16:
        q, k, v = q.float(), k.float(), v.float()
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    with torch.autocast("cpu", enabled=False):
        out: Tensor = _TiledAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, mask, None if sink is None else sink.to(q.dtype)
        )
    return out.to(dtype)


@lru_cache(maxsize=1)
def _supported_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes that are faster here than by the fused kernel."""
    has_amx = torch.cpu._is_amx_tile_supported()
    return (torch.float32,) if has_amx else (torch.float32, torch.bfloat16)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, sink: Tensor | None
    ) -> Tensor:
        window, documents = mask.window, mask.documents
        sink_tokens = 0 if window is None else mask.sink_tokens
        ctx.tiles = [*query_tiles(q.shape[2], _find_tile_window(mask), sink_tokens)]
        ctx.shape, ctx.sink_tokens = q.shape, sink_tokens
        ctx.scale = 1 / math.sqrt(q.shape[-1])
        out = _empty_token_major(q, v.shape[-1])
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q * ctx.scale, k, v))
        logits = None if sink is None else sink.repeat(ctx.shape[0])[:, None]  # (N, 1)
        probabilities, of_sink = [], []
        for start, end, low in ctx.tiles:
            scores = torch.bmm(q[:, start:end], read_tile(k, low, end, sink_tokens).mT)
            by_head = scores.view(*ctx.shape[:2], *scores.shape[1:])
            if sink_tokens and low == 0:
                visible = mask.to_dense(slice(start, end), q.device)
                by_head.masked_fill_(~visible, -math.inf)
            else:
                _mask_scores(scores[..., sink_tokens if low else 0 :], start, low, window)
                if documents is not None:
                    visible = documents.same_document(slice(start, end), slice(low, end))
                    by_head.masked_fill_(~visible, -math.inf)
            if logits is None:
                probabilities.append(torch.softmax(scores, -1, out=scores))
            else:
                surplus = torch.logsumexp(scores, -1) - logits
                torch.softmax(scores, -1, out=scores).mul_(surplus.sigmoid()[..., None])
                probabilities.append(scores)
                of_sink.append((-surplus).sigmoid())
            tile = torch.bmm(probabilities[-1], read_tile(v, low, end, sink_tokens))
            out[:, :, start:end] = tile.view(*ctx.shape[:2], *tile.shape[1:])
        kept = [] if sink is None else [out, torch.cat(of_sink, 1)]
        ctx.has_sink = sink is not None
        ctx.save_for_backward(q, k, v, *kept, *probabilities)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *probabilities = ctx.saved_tensors
        heads = ctx.shape[:2]
        d_sink = None
        if ctx.has_sink:
            out, of_sink, *probabilities = probabilities
            drawn = of_sink.view(*heads, -1) * (grad_output * out).sum(-1)
            d_sink = -drawn.sum((0, 2))
        dq = _empty_token_major(grad_output, q.shape[-1])
        dk, dv = _zero_gradient(k), _zero_gradient(v)
        grad_output = grad_output.reshape(v.shape)
        for (start, end, low), p in zip(ctx.tiles, probabilities, strict=True):
            grad_tile, sinks = grad_output[:, start:end], ctx.sink_tokens
            _accumulate_tile(dv, p, grad_tile, low, end, sinks)
            ds = torch.bmm(grad_tile, read_tile(v, low, end, sinks).mT)
            torch.ops.aten._softmax_backward_data.out(ds, p, -1, ds.dtype, grad_input=ds)
            tile = torch.bmm(ds, read_tile(k, low, end, sinks)).mul_(ctx.scale)
            dq[:, :, start:end] = tile.view(*heads, *tile.shape[1:])
            _accumulate_tile(dk, ds, q[:, start:end], low, end, sinks)
        d_kv = (dk.view(*heads, *dk.shape[1:]), dv.view(*heads, *dv.shape[1:]))
        return dq, *d_kv, None, d_sink


def read_tile(values: Tensor, low: int, end: int, sink_tokens: int) -> Tensor:
    """Return keys or values (..., T, D) from ``low`` to ``end``, and the sinks before them."""
    if low == 0 or not sink_tokens:
        return values[..., low:end, :]
    return torch.cat([values[..., :sink_tokens, :], values[..., low:end, :]], -2)


def _accumulate_tile(
    total: Tensor, left: Tensor, right: Tensor, low: int, end: int, sink_tokens: int
) -> None:
    """Add (N, C, K) transposed times (N, C, D) to what the tile reads of ``total`` (N, T, D)."""
    sinks = sink_tokens if low else 0
    if sinks:
        _accumulate_product(total[:, :sinks], left[..., :sinks], right)
    _accumulate_product(total[:, low:end], left[..., sinks:], right)


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
