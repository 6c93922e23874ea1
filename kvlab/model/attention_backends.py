"""The attention backends, and the rule that selects one.

A backend attends C queries to P + C consecutive keys that end with the last query. Each query sees
itself and the ``window - 1`` tokens before it, or all of them if ``window`` is None, but no token
of another document; with documents, P is 0. Beside the window it sees the first ``sink_tokens`` of
its text, which is then all there, or of its document. A ``sink`` of (H,) logits joins the
denominators of the softmax. All backends agree within rounding.

Shapes: B rows, H heads, Hkv K/V heads, C queries, P past tokens, D width of Q and K, Dv of V.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from kvlab.cache import DocumentMask, ScaledCodes
from kvlab.cache.attention_pass import softmax_with_sink
from kvlab.cache.formats import convert_codes
from kvlab.model.kernels.rotate_pairs import rotate_into
from kvlab.model.kernels.tiled_attention import (
    Attend,
    attend_tiled,
    make_visible_mask,
    tiled_attention,
)
from kvlab.model.kernels.triton_kernels import MAX_WIDTH, are_kernels_usable, attend_stored
from kvlab.model.rope import RopeTable, apply_rope

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
        attend: takes q (B, H, C, D), k (B, Hkv, P + C, D), v (B, Hkv, P + C, Dv), window,
            documents, sink, sink_tokens; returns (B, H, C, Dv).
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
        causal = make_band_mask(q.shape[2], k.shape[2], None, q.device) if is_causal else mask
        return _attend_with_sink(q, k, v, causal, sink)
    n_head, n_kv_head = q.shape[1], k.shape[1]
    if repeats_kv_heads(q.device.type, q.dtype, n_head, n_kv_head, has_mask=mask is not None):
        k, v = (t.repeat_interleave(n_head // n_kv_head, 1) for t in (k, v))
    is_grouped, v_width = n_head != k.shape[1], v.shape[3]
    if v_width < k.shape[3]:  # fused kernels serve keys and values of one width
        v = F.pad(v, (0, k.shape[3] - v_width))
    if _recorded is not None and not torch.compiler.is_compiling():
        choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, enable_gqa=is_grouped)
        _recorded.add(SDPBackend(choice).name.lower())
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=is_grouped
    )
    return y[..., :v_width]


def _attend_with_sink(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: Tensor) -> Tensor:
    """Attend with a sink by the definition. The queries of a K/V head are rows of one matrix."""
    batch, n_head, queries, width = q.shape
    n_kv_head, keys = k.shape[1:3]
    grouped = q.reshape(batch, n_kv_head, -1, width) / math.sqrt(width)
    scores = (grouped @ k.transpose(-1, -2)).view(batch, n_head, queries, keys)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask
    probabilities = softmax_with_sink(scores, sink).to(v.dtype)
    y = probabilities.reshape(batch, n_kv_head, -1, keys) @ v
    return y.view(batch, n_head, queries, v.shape[-1])


CODE_CHUNK = 2**17
"""Codes that are converted, or numbers that are rotated, at a time on CPU. As float32 they fit a
core's cache."""


@dataclass(frozen=True)
class UnrotatedKeys:
    """Keys (B, H, T, D) that are stored as they are before they are rotated.

    Attributes:
        values: (B, H, T, D).
        table: the rotations at their positions.
    """

    values: Tensor
    table: RopeTable

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def rotate(self) -> Tensor:
        """Return the keys, rotated."""
        return apply_rope(self.values, self.table)


def attend_unrotated(
    q: Tensor, k: UnrotatedKeys, v: Tensor, mask: Tensor | None, sink: Tensor | None = None
) -> Tensor:
    """Attend queries (B, H, C, D) to keys of as many heads that are rotated as they are read.

    On CPU they are rotated some at a time, in memory that stays in a core's cache: new memory for
    all of them would cost more than the rotation.

    Args:
        mask: (B or 1, 1, 1, T) of bool, true where a query sees; or None.
        sink: (H, C) logits that join the denominators; or None.
    """
    needs_plain = torch.compiler.is_compiling() or (torch.is_grad_enabled() and q.requires_grad)
    is_added = mask is not None and mask.dtype != torch.bool
    if q.device.type != "cpu" or needs_plain or is_added:
        return scaled_dot_product(q, k.rotate(), v, mask, sink=sink)
    note_kernel("rotated_blocks")
    scores = multiply_unrotated(q * q.shape[-1] ** -0.5, k)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    probabilities = scores.softmax(-1) if sink is None else softmax_with_sink(scores, sink)
    return probabilities.to(v.dtype) @ v


def multiply_unrotated(q: Tensor, k: UnrotatedKeys) -> Tensor:
    """Return the products (B, H, C, T) of queries with keys, which are rotated in blocks."""
    cos, sin = k.table
    if cos.dim() == 4:  # rows differ
        rows = (
            (q[row : row + 1], UnrotatedKeys(k.values[row : row + 1], RopeTable(*tables)))
            for row, tables in enumerate(zip(cos[:, 0], sin[:, 0], strict=True))
        )
        return torch.cat([multiply_unrotated(*row) for row in rows])
    batch, heads, count, _ = q.shape
    keys, queries = k.values.flatten(0, 1), q.flatten(0, 1)  # (N, T, D), (N, C, D)
    size, rotary_dim = max(1, CODE_CHUNK // max(1, keys[0].numel())), 2 * cos.shape[-1]
    products = q.new_empty(len(keys), count, keys.shape[1])
    scratch = keys.new_empty(min(size, len(keys)), keys.shape[1], rotary_dim)
    for start in range(0, len(keys), size):
        part = slice(start, min(start + size, len(keys)))
        out, block = products[part], keys[part]
        rotated = rotate_into(scratch[: len(block)], block[..., :rotary_dim], cos, sin)
        torch.bmm(queries[part][..., :rotary_dim], rotated.mT, out=out)
        if rotary_dim < keys.shape[2]:
            out.baddbmm_(queries[part][..., rotary_dim:], block[..., rotary_dim:].mT)
    return products.view(batch, heads, count, -1)


DECODE_KERNEL = "triton_decode"
"""The name of the CUDA kernel by which one token attends."""


def attends_by_triton(q: Tensor) -> bool:
    """Return whether one token's queries (B, H, C, D) attend by Triton's kernel.

    torch's attention with a mask does not split a text among processors, of which a small batch
    would then occupy few.
    """
    return (
        are_kernels_usable(q.device)
        and q.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and q.shape[-1] <= MAX_WIDTH
        and not (torch.is_grad_enabled() and q.requires_grad)
        and not torch.compiler.is_compiling()
    )


def takes_codes(q: Tensor) -> bool:
    """Return whether one token's queries attend to codes without a decoded copy of them.

    In half precision only Triton's kernel does: torch would round products before they are scaled.
    """
    return q.dtype == torch.float32 or attends_by_triton(q)


def attend_decoded(
    q: Tensor,
    k: Tensor | UnrotatedKeys | ScaledCodes,
    v: Tensor | ScaledCodes,
    mask: Tensor | None,
    sink: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Attend one token's queries (B, H, C, D) to K and V (B, H, S, D) of as many heads.

    Args:
        mask: (B or 1, 1 or H, 1 or C, S), see `scaled_dot_product`; with codes of one row and bool.
        sink: (H, C) logits that join the denominators; or None.
        counts: (B,) beside a mask: its first true entries in each row; the others are false.
    """
    if attends_by_triton(q) and (mask is None or counts is not None):
        note_kernel(DECODE_KERNEL)
        stored = k.rotate() if isinstance(k, UnrotatedKeys) else k
        return attend_stored(q, stored, v, counts, sink)
    if isinstance(k, ScaledCodes) and isinstance(v, ScaledCodes):
        return attend_codes(q, k, v, mask, sink)
    assert isinstance(v, Tensor), "both are codes, or neither is"
    if isinstance(k, UnrotatedKeys):
        return attend_unrotated(q, k, v, mask, sink)
    assert isinstance(k, Tensor), "both are codes, or neither is"
    return scaled_dot_product(q, k, v, mask, sink=sink)


def attend_codes(
    q: Tensor, k: ScaledCodes, v: ScaledCodes, mask: Tensor | None, sink: Tensor | None = None
) -> Tensor:
    """Attend queries (B, H, C, D) in float32 to K and V of as many heads, stored as codes.

    Scales are applied to scores and weights, so that codes are only converted, some at a time.

    Args:
        mask: (B or 1, 1, 1, S) of bool, true where a query sees; or None.
        sink: (H, C) logits that join the denominators; or None.
    """
    batch, heads, count, width = q.shape
    note_kernel("scaled_codes")
    queries = q.reshape(batch * heads, count, width) * width**-0.5
    scores = multiply_codes(queries, k.codes.flatten(0, 1), is_transposed=True)
    scores *= k.scales.flatten(0, 1).mT
    scores = scores.view(batch, heads, count, -1)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    probabilities = scores.softmax(-1) if sink is None else softmax_with_sink(scores, sink)
    weights = probabilities.flatten(0, 1) * v.scales.flatten(0, 1).mT
    return multiply_codes(weights, v.codes.flatten(0, 1)).view(batch, heads, count, -1)


def multiply_codes(x: Tensor, codes: Tensor, *, is_transposed: bool = False) -> Tensor:
    """Return x (N, C, K) times codes (N, K, M), or times codes (N, M, K) transposed."""
    number, _, _ = codes.shape
    chunk = number if x.device.type != "cpu" else max(1, CODE_CHUNK // codes[0].numel())
    products = []
    for start in range(0, number, chunk):
        matrix = convert_codes(codes[start : start + chunk], x.dtype)
        products.append(x[start : start + chunk] @ (matrix.mT if is_transposed else matrix))
    return products[0] if len(products) == 1 else torch.cat(products)


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
    if _recorded is not None and not torch.compiler.is_compiling():
        _recorded.add(name)


def attend_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    documents: DocumentMask | None = None,
    sink: Tensor | None = None,
    sink_tokens: int = 0,
) -> Tensor:
    """Attend by torch's scaled dot-product attention: any shape, but a window saves no work."""
    queries, keys = q.shape[2], k.shape[2]
    if window is not None and window >= keys:
        window = None
    if window is None and queries == keys and documents is None:
        return scaled_dot_product(q, k, v, is_causal=True, sink=sink)
    # is_causal would align the triangle with the first key instead of the last
    if documents is None:
        mask = make_band_mask(queries, keys, window, q.device, sink_tokens)
    else:
        mask = documents.cached(
            ("sdpa", window, sink_tokens),
            lambda: make_visible_mask(slice(0, keys), window, sink_tokens, documents, q.device),
        )
    return scaled_dot_product(q, k, v, mask, sink=sink)


def make_band_mask(
    queries: int, keys: int, window: int | None, device: torch.device, sink_tokens: int = 0
) -> Tensor:
    """Return (queries, keys) of bool: which of the keys, up to the last query, each query sees."""
    causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if window is None:
        return causal
    band = causal.triu(keys - queries - window + 1)
    band[:, :sink_tokens] = causal[:, :sink_tokens]
    return band


MIN_QUERY_BLOCK = 64
"""Queries of one block, where the window is shorter."""


def attend_windowed_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    documents: DocumentMask | None = None,
    sink: Tensor | None = None,
    sink_tokens: int = 0,
) -> Tensor:
    """Attend in blocks of Q queries, which read only the Q + window - 1 keys that they see.

    The work is proportional to tokens times (Q + window) instead of tokens squared. On CPU the
    loop over blocks is faster than one batched call.
    """
    assert window is not None, "an unbounded window has no blocks"
    if documents is not None and sink_tokens:  # which are anywhere
        return attend_sdpa(q, k, v, window, documents, sink, sink_tokens)
    queries, past = q.shape[2], k.shape[2] - q.shape[2]
    block_size = max(window, MIN_QUERY_BLOCK)
    masks: dict[tuple[tuple[int, int], bool], Tensor] = {}  # all inner blocks share one
    blocks = []
    for start in range(0, queries, block_size):
        end = min(start + block_size, queries)
        low, high = max(0, past + start - window + 1), past + end
        if low <= sink_tokens:
            low = 0
        shape = (end - start, high - low + (sink_tokens if low else 0))
        if (shape, low > 0) not in masks:
            mask = make_band_mask(shape[0], high - low, window, q.device, 0 if low else sink_tokens)
            sinks = mask.new_ones(shape[0], shape[1] - (high - low))
            masks[shape, low > 0] = torch.cat([sinks, mask], 1)
        mask = masks[shape, low > 0]
        if documents is not None:
            mask = mask & documents.same_document(slice(start, end), slice(low, high))
        keys, values = (_read_block(part, low, high, sink_tokens) for part in (k, v))
        blocks.append(scaled_dot_product(q[:, :, start:end], keys, values, mask, sink=sink))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def _read_block(part: Tensor, low: int, high: int, sink_tokens: int) -> Tensor:
    """Return the keys or values from ``low`` to ``high``, after the sinks if they are before it."""
    if low == 0 or not sink_tokens:
        return part[:, :, low:high]
    return torch.cat([part[:, :, :sink_tokens], part[:, :, low:high]], 2)


FLEX_BLOCK = 128


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    documents: DocumentMask | None = None,
    sink: Tensor | None = None,
    sink_tokens: int = 0,
) -> Tensor:
    """Attend by FlexAttention: windows compiled into one block-sparse kernel on CUDA.

    On CPU it has no backward pass (torch 2.13). A compiled model takes kernel and mask into its
    own graph, where the mask is a small kernel of each pass. Otherwise the kernel is compiled
    alone, and a mask is built once for each shape.
    """
    queries, keys = q.shape[2], k.shape[2]
    window = window or keys
    is_compiling = torch.compiler.is_compiling()
    if documents is not None:
        mask = documents.cached(
            ("flex", window, sink_tokens),
            lambda: _make_document_block_mask(documents, window, sink_tokens),
        )
    elif is_compiling:
        mask = _make_block_mask(queries, keys, window, q.device, sink_tokens)
    else:
        mask = _cached_block_mask(queries, keys, window, q.device, sink_tokens)
    if is_compiling or q.device.type != "cuda":
        return _run_flex(flex_attention, q, k, v, mask, sink)
    return attend_compiled_flex(q, k, v, window, documents, mask, sink, sink_tokens)


def _run_flex(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, sink: Tensor | None
) -> Tensor:
    """Run FlexAttention. A sink takes its share of a sum that the kernel returns the log of."""
    is_grouped = q.shape[1] != k.shape[1]
    out: Tensor
    if sink is None:
        out = kernel(q, k, v, block_mask=mask, enable_gqa=is_grouped)
        return out
    aux = AuxRequest(lse=True)
    out, more = kernel(q, k, v, block_mask=mask, enable_gqa=is_grouped, return_aux=aux)
    share = (more.lse - sink[:, None].to(more.lse.dtype)).sigmoid()
    out = out * share[..., None].to(out.dtype)
    return out


FLEX_SHAPES = 64
"""Shapes for which the kernel is compiled, each once. torch's own limit is 8."""


def attend_compiled_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    documents: DocumentMask | None,
    mask: BlockMask | None,
    sink: Tensor | None = None,
    sink_tokens: int = 0,
) -> Tensor:
    """Run the kernel of these shapes, compiled at their first use.

    Once there are `FLEX_SHAPES` of them, torch would go on with flex_attention's unfused form,
    which holds the scores of all queries and keys. Other backends take its place here.
    """
    note_kernel("flex")
    limits = {"recompile_limit": FLEX_SHAPES, "fail_on_recompile_limit_hit": True}
    try:
        with torch._dynamo.config.patch(limits):
            out = _run_flex(_compile_flex(), q, k, v, mask, sink)
    except FailOnRecompileLimitHit:
        _warn_of_shapes(FLEX_SHAPES)
        attend = attend_windowed_blocks if _is_windowed(k, window) else attend_sdpa
        out = attend(q, k, v, window, documents, sink, sink_tokens)
    return out


@lru_cache(maxsize=1)
def _compile_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=1)
def _warn_of_shapes(limit: int) -> None:
    text = f"over {limit} shapes of attention in one process: no more are compiled"
    _log.warning("%s, and windows are computed in blocks, slower", text)


@lru_cache(maxsize=64)
def _cached_block_mask(
    queries: int, keys: int, window: int, device: torch.device, sink_tokens: int
) -> BlockMask:
    return _make_block_mask(queries, keys, window, device, sink_tokens)


def _make_block_mask(
    queries: int, keys: int, window: int, device: torch.device, sink_tokens: int = 0
) -> BlockMask:
    past = keys - queries

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + past - key
        if not sink_tokens:
            return (distance >= 0) & (distance < window)
        return (distance >= 0) & ((distance < window) | (key < sink_tokens))

    return create_block_mask(
        is_visible, None, None, queries, keys, device=str(device), BLOCK_SIZE=FLEX_BLOCK
    )


def _make_document_block_mask(
    documents: DocumentMask, window: int, sink_tokens: int = 0
) -> BlockMask:
    """Build the mask of one pass's documents, for all of its layers."""
    ids, positions = documents.ids, documents.positions
    rows, count = ids.shape

    def is_visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query - key
        is_near = distance < window
        if sink_tokens:
            is_near = is_near | (positions[row, key] < sink_tokens)
        return (distance >= 0) & is_near & (ids[row, query] == ids[row, key])

    return create_block_mask(
        is_visible, rows, None, count, count, device=str(ids.device), BLOCK_SIZE=FLEX_BLOCK
    )


def _is_windowed(k: Tensor, window: int | None) -> bool:
    """Return whether some query does not see all keys before it."""
    return window is not None and window < k.shape[2]


BACKENDS: dict[str, Backend] = {
    "cpu_tiled": Backend(attend_tiled, tiled_attention.is_fast),
    "flex": Backend(
        attend_flex,
        lambda q, k, _v, window, documents, sink, _sink_tokens: (
            q.device.type == "cuda"
            and q.requires_grad  # else each new length would be compiled, for one use
            and torch.is_grad_enabled()
            and q.shape[2] == k.shape[2]
            and (documents is not None or sink is not None or _is_windowed(k, window))
        ),
    ),
    "windowed_blocks": Backend(
        attend_windowed_blocks,
        lambda _q, k, _v, window, documents, _sink, sink_tokens: (
            _is_windowed(k, window) and not (documents is not None and sink_tokens)
        ),
    ),
    "sdpa": Backend(attend_sdpa, lambda *_: True),
}
"""In order of preference. To add a backend, add its function and one entry; the contract in
``tests/contracts/attention_backend_contract.py`` says what it must do."""


def select_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    documents: DocumentMask | None = None,
    sink: Tensor | None = None,
    sink_tokens: int = 0,
) -> str:
    """Return the name of the backend for these arguments."""
    for name, backend in BACKENDS.items():
        if backend.is_best(q, k, v, window, documents, sink, sink_tokens):
            return name
    raise AssertionError("the last backend serves every shape")
