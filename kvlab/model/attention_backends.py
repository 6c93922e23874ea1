"""The attention backends, and the rule that selects one.

A backend attends C queries to P + C consecutive keys that end with the last query, of which each
sees those of a `CausalMask`; with documents, P is 0. A ``sink`` of (H,) logits joins the
denominators of the softmax. All backends agree within rounding.

Shapes: B rows, H heads, Hkv K/V heads, C queries, P past tokens, D width of Q and K, Dv of V.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

from kvlab.cache import DocumentMask
from kvlab.cache.attention_pass import softmax_with_sink
from kvlab.model.causal_mask import CausalMask
from kvlab.model.kernels.tiled_attention import Attend, attend_tiled, read_tile, tiled_attention


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
        attend: takes q (B, H, C, D), k (B, Hkv, P + C, D), v (B, Hkv, P + C, Dv), the
            mask and the sink; returns (B, H, C, Dv).
        is_best: takes the same; returns whether to use this backend if none before it in
            `BACKENDS` is used.
    """

    attend: Attend
    is_best: Callable[..., bool]


def scaled_dot_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    sink: Tensor | None = None,
) -> Tensor:
    """Return torch's scaled dot-product attention of q (B, H, C, D) to k and v (B, Hkv, T, D).

    Args:
        mask: (B or 1, H or 1, C, T), added to the scores, or of bool and true where a query sees.
        sink: (H,) or (H, C) logits that join the denominators. torch has no such kernel, so the
            scores of all pairs are then in memory.
    """
    if sink is not None:
        note_kernel("math")
        if is_causal:
            mask = CausalMask().to_dense(slice(0, q.shape[2]), q.device)
        return _attend_with_sink(q, k, v, mask, sink)
    n_head, n_kv_head = q.shape[1], k.shape[1]
    if repeats_kv_heads(q.device.type, q.dtype, n_head, n_kv_head, has_mask=mask is not None):
        k, v = (t.repeat_interleave(n_head // n_kv_head, 1) for t in (k, v))
    if q.device.type == "cuda" and not torch.compiler.is_compiling():
        q, k, v = (align_vectors(t) for t in (q, k, v))
    is_grouped, v_width = n_head != k.shape[1], v.shape[3]
    is_narrow = v_width < k.shape[3]
    if is_narrow:  # fused kernels serve keys and values of one width
        v = F.pad(v, (0, k.shape[3] - v_width))
    avoids_plans = mask is not None and q.device.type == "cuda"
    with sdpa_kernel(_MASKED_BACKENDS) if avoids_plans else nullcontext():
        if not torch.compiler.is_compiling() and _recorded is not None:
            choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, enable_gqa=is_grouped)
            _recorded.add(SDPBackend(choice).name.lower())
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=is_grouped
        )
    return y[..., :v_width] if is_narrow else y


ALIGNED_BYTES = 16
"""What torch's kernels for CUDA load at once."""


def align_vectors(t: Tensor) -> Tensor:
    """Return ``t`` (..., D), copied if a vector of it is not at a multiple of `ALIGNED_BYTES`.

    The memory-efficient kernel looks at the strides of rows and heads, not at those of tokens
    (torch 2.11), and faults there.
    """
    starts = (*t.stride()[:-1], t.storage_offset())
    is_aligned = all(start * t.itemsize % ALIGNED_BYTES == 0 for start in starts)
    return t if is_aligned else t.clone(memory_format=torch.contiguous_format)


_MASKED_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN: it plans each new shape for tens of milliseconds on the host, and every token that is
decoded with a mask has one."""


SINK_SCORES = 2**26
"""Scores that are in memory at once without a gradient."""


def _attend_with_sink(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: Tensor) -> Tensor:
    """Attend with a sink by the definition. The queries of a K/V head are rows of one matrix."""
    batch, n_head, queries, width = q.shape
    n_kv_head, keys = k.shape[1:3]
    count = max(1, SINK_SCORES // (batch * n_head * keys))
    if queries > count and not torch.is_grad_enabled():
        parts = (slice(start, start + count) for start in range(0, queries, count))
        return torch.cat([
            _attend_with_sink(
                q[:, :, part], k, v,
                mask if mask is None or mask.shape[-2] == 1 else mask[..., part, :],
                sink if sink.dim() == 1 else sink[:, part],
            )
            for part in parts
        ], 2)  # fmt: skip
    grouped = q.reshape(batch, n_kv_head, -1, width) / math.sqrt(width)
    scores = (grouped @ k.transpose(-1, -2)).view(batch, n_head, queries, keys)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask
    probabilities = softmax_with_sink(scores, sink).to(v.dtype)
    y = probabilities.reshape(batch, n_kv_head, -1, keys) @ v
    return y.view(batch, n_head, queries, v.shape[-1])


def repeats_kv_heads(
    device_type: str, dtype: torch.dtype, n_head: int, n_kv_head: int, *, has_mask: bool
) -> bool:
    """Return whether K and V need as many heads as the queries for a fused kernel to run.

    On CUDA only flash and cuDNN attention share a K/V head among queries, both in half precision
    and flash without a mask. For all else torch would take its math kernel, which holds scores of
    every query and key. The repeated K and V are small beside those.
    """
    if device_type != "cuda" or n_head == n_kv_head:
        return False
    return has_mask or dtype not in (torch.float16, torch.bfloat16)


_recorded: set[str] | None = None
"""The kernels that ran, while they are recorded. Whatever a compiled function reads is a condition
of its use: ask first whether this is one, or it would be compiled again when the set grows."""


@contextmanager
def record_kernels() -> Iterator[set[str]]:
    """Yield a set that gets the name of every attention kernel that runs in the block.

    A block around it gets them, too.

    Of torch's attention it has torch's own names, ``flash_attention``, ``efficient_attention``,
    ``cudnn_attention`` and ``math``, and of other backends those in `BACKENDS`.
    """
    global _recorded
    previous, _recorded = _recorded, set()
    try:
        yield _recorded
    finally:
        if previous is not None:
            previous |= _recorded
        _recorded = previous


def note_kernel(name: str) -> None:
    """Add a kernel that is about to run, if kernels are recorded."""
    if not torch.compiler.is_compiling() and _recorded is not None:
        _recorded.add(name)


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, sink: Tensor | None = None
) -> Tensor:
    """Attend by torch's scaled dot-product attention: any shape, but a window saves no work."""
    queries, keys = q.shape[2], k.shape[2]
    # is_causal would align the triangle with the first key instead of the last
    if not mask.is_windowed(keys) and queries == keys and mask.documents is None:
        return scaled_dot_product(q, k, v, is_causal=True, sink=sink)
    positions = slice(keys - queries, keys)
    if mask.documents is None:
        visible = mask.to_dense(positions, q.device)
    else:
        visible = mask.documents.cached(
            ("sdpa", mask.window, mask.sink_tokens), lambda: mask.to_dense(positions, q.device)
        )
    return scaled_dot_product(q, k, v, visible, sink=sink)


MIN_QUERY_BLOCK = 64
"""Queries of one block, where the window is shorter."""


def attend_windowed_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, sink: Tensor | None = None
) -> Tensor:
    """Attend in blocks of Q queries, which read only the Q + window - 1 keys that they see.

    The work is proportional to tokens times (Q + window) instead of tokens squared. On CPU the
    loop over blocks is faster than one batched call.
    """
    window, sink_tokens, documents = mask.window, mask.sink_tokens, mask.documents
    assert window is not None, "an unbounded window has no blocks"
    if mask.has_scattered_sinks:
        return attend_sdpa(q, k, v, mask, sink)
    queries, past = q.shape[2], k.shape[2] - q.shape[2]
    block_size = max(window, MIN_QUERY_BLOCK)
    inner, first = CausalMask(window), CausalMask(window, sink_tokens)
    masks: dict[tuple[int, int, bool], Tensor] = {}  # all inner blocks share one
    blocks = []
    for start in range(0, queries, block_size):
        end = min(start + block_size, queries)
        low, high = max(0, past + start - window + 1), past + end
        if low <= sink_tokens:
            low = 0
        shape = (end - start, high - low, low > 0)
        if shape not in masks:
            positions = slice(high - low - (end - start), high - low)
            visible = (inner if low else first).to_dense(positions, q.device)
            if low and sink_tokens:
                visible = torch.cat([visible.new_ones(end - start, sink_tokens), visible], 1)
            masks[shape] = visible
        visible = masks[shape]
        if documents is not None:
            visible = visible & documents.same_document(slice(start, end), slice(low, high))
        keys, values = (read_tile(part, low, high, sink_tokens) for part in (k, v))
        blocks.append(scaled_dot_product(q[:, :, start:end], keys, values, visible, sink=sink))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


FLEX_BLOCK = 128

FLEX_WIDTH = 16
"""The narrowest heads that the kernel of CUDA serves."""


FLEX_SHAPES = 64
"""Shapes for which the kernel stays compiled. torch's own limit is 8."""


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: CausalMask,
    sink: Tensor | None = None,
    *,
    compiles: bool | None = None,
) -> Tensor:
    """Attend by FlexAttention: windows compiled into one block-sparse kernel on CUDA.

    On CPU it has no backward pass (torch 2.13). A compiled model takes kernel and mask into its
    own graph, where the mask is a small kernel of each pass. Otherwise the kernel is compiled
    alone, at the first use of these shapes, and a mask is built once for each shape.

    Args:
        compiles: whether the kernel is compiled alone; default on CUDA.
    """
    shape = (q.shape[2], k.shape[2], mask.window or k.shape[2], mask.sink_tokens, q.device)
    is_compiling = torch.compiler.is_compiling()
    if mask.documents is not None:
        blocks = mask.documents.cached(
            ("flex", mask.window, mask.sink_tokens),
            lambda: _make_block_mask(*shape, mask.documents),
        )
    elif is_compiling:
        blocks = _make_block_mask(*shape)
    else:
        blocks = _cached_block_mask(*shape)
    note_kernel("flex")
    if is_compiling or not (q.device.type == "cuda" if compiles is None else compiles):
        return _run_flex(flex.flex_attention, q, k, v, blocks, sink)
    return run_compiled(FLEX_SHAPES, lambda: _run_flex(_compile_flex(), q, k, v, blocks, sink))


def run_compiled(shapes: int, run: Callable[[], Tensor]) -> Tensor:
    """Return ``run()``, whose compiled code is forgotten before it has more than ``shapes``.

    Beyond its limit torch would run functions as they are: flex_attention then holds the scores of
    all queries and keys.
    """
    limits = {"recompile_limit": shapes, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        try:
            return run()
        except FailOnRecompileLimitHit:
            torch.compiler.reset()
            return run()


def _run_flex(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, blocks: flex.BlockMask | None, sink: Tensor | None
) -> Tensor:
    """Run FlexAttention. A sink takes its share of a sum that the kernel returns the log of."""
    is_grouped = q.shape[1] != k.shape[1]
    out: Tensor
    if sink is None:
        out = kernel(q, k, v, block_mask=blocks, enable_gqa=is_grouped)
        return out
    aux = flex.AuxRequest(lse=True)
    out, more = kernel(q, k, v, block_mask=blocks, enable_gqa=is_grouped, return_aux=aux)
    share = (more.lse - sink[:, None].to(more.lse.dtype)).sigmoid()
    out = out * share[..., None].to(out.dtype)
    return out


@lru_cache(maxsize=1)
def _compile_flex() -> Any:
    return torch.compile(flex.flex_attention, dynamic=False)


def _make_block_mask(
    queries: int,
    keys: int,
    window: int,
    sink_tokens: int,
    device: torch.device,
    documents: DocumentMask | None = None,
) -> flex.BlockMask:
    past = keys - queries
    ids = None if documents is None else documents.ids
    positions = None if documents is None else documents.positions

    def is_visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + past - key
        is_near = distance < window
        if sink_tokens:
            first = key if positions is None else positions[row, key]
            is_near = is_near | (first < sink_tokens)
        visible = (distance >= 0) & is_near
        return visible if ids is None else visible & (ids[row, query] == ids[row, key])

    rows = None if ids is None else len(ids)
    return flex.create_block_mask(
        is_visible, rows, None, queries, keys, device=str(device), BLOCK_SIZE=FLEX_BLOCK
    )


_cached_block_mask = lru_cache(maxsize=64)(_make_block_mask)


BACKENDS: dict[str, Backend] = {
    "cpu_tiled": Backend(attend_tiled, tiled_attention.is_fast),
    "flex": Backend(
        attend_flex,
        lambda q, k, v, mask, sink: (
            q.device.type == "cuda"
            and q.requires_grad  # else each new length would be compiled, for one use
            and torch.is_grad_enabled()
            and q.shape[2] == k.shape[2]
            and min(q.shape[3], v.shape[3]) >= FLEX_WIDTH
            and (mask.documents is not None or sink is not None or mask.is_windowed(k.shape[2]))
        ),
    ),
    "windowed_blocks": Backend(
        attend_windowed_blocks,
        lambda _q, k, _v, mask, _sink: (
            mask.is_windowed(k.shape[2]) and not mask.has_scattered_sinks
        ),
    ),
    "sdpa": Backend(attend_sdpa, lambda *_: True),
}
"""In order of preference. To add a backend, add its function and one entry; the contract in
``tests/contracts/attention_backend_contract.py`` says what it must do."""


def select_backend(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, sink: Tensor | None = None
) -> str:
    """Return the name of the backend for these arguments."""
    return next(name for name, one in BACKENDS.items() if one.is_best(q, k, v, mask, sink))
