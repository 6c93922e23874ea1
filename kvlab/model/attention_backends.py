"""The attention backends, and the rule that selects one.

A backend attends C queries to P + C consecutive keys that end with the last query. Each query sees
itself and the ``window - 1`` tokens before it, or all of them if ``window`` is None, but no token
of another document; with documents, P is 0. All backends agree within rounding.

Shapes: B rows, H heads, Hkv K/V heads, C queries, P past tokens, D width of Q and K, Dv of V.
"""

import logging
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
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from kvlab.cache import DocumentMask, ScaledCodes
from kvlab.cache.formats import convert_codes
from kvlab.model.kernels.tiled_attention import Attend, attend_tiled, tiled_attention

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
        attend: takes q (B, H, C, D), k (B, Hkv, P + C, D), v (B, Hkv, P + C, Dv), window,
            documents; returns (B, H, C, Dv).
        is_best: takes the same; returns whether to use this backend if none before it in
            `BACKENDS` is used.
    """

    attend: Attend
    is_best: Callable[[Tensor, Tensor, Tensor, int | None, DocumentMask | None], bool]


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False
) -> Tensor:
    """Return torch's scaled dot-product attention of q (B, H, C, D) to k and v (B, Hkv, T, D).

    Args:
        mask: (B or 1, H or 1, C, T), added to the scores, or of bool and true where a query sees.
    """
    n_head, n_kv_head = q.shape[1], k.shape[1]
    if repeats_kv_heads(q.device.type, q.dtype, n_head, n_kv_head, has_mask=mask is not None):
        k, v = (t.repeat_interleave(n_head // n_kv_head, 1) for t in (k, v))
    is_grouped = n_head != k.shape[1]
    if _recorded is not None and not torch.compiler.is_compiling():
        choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, enable_gqa=is_grouped)
        _recorded.add(SDPBackend(choice).name.lower())
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=is_grouped
    )


CODE_CHUNK = 2**17
"""Codes that are converted at a time on CPU. As float32 they fit a core's cache."""


def attend_codes(q: Tensor, k: ScaledCodes, v: ScaledCodes, mask: Tensor | None) -> Tensor:
    """Attend queries (B, H, C, D) in float32 to K and V of as many heads, stored as codes.

    Scales are applied to scores and weights, so that codes are only converted, some at a time.

    Args:
        mask: (B or 1, 1, 1, S) of bool, true where a query sees; or None.
    """
    batch, heads, count, width = q.shape
    note_kernel("scaled_codes")
    queries = q.reshape(batch * heads, count, width) * width**-0.5
    scores = multiply_codes(queries, k.codes.flatten(0, 1), is_transposed=True)
    scores *= k.scales.flatten(0, 1).mT
    if mask is not None:
        scores.view(batch, heads, count, -1).masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(-1) * v.scales.flatten(0, 1).mT
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

    Of torch's attention it has torch's own names, ``flash_attention``, ``efficient_attention``,
    ``cudnn_attention`` and ``math``, and of other backends those in `BACKENDS`.
    """
    global _recorded
    previous, _recorded = _recorded, set()
    try:
        yield _recorded
    finally:
        _recorded = previous


def note_kernel(name: str) -> None:
    """Add a kernel that is about to run, if kernels are recorded."""
    if _recorded is not None and not torch.compiler.is_compiling():
        _recorded.add(name)


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: DocumentMask | None = None
) -> Tensor:
    """Attend by torch's scaled dot-product attention: any shape, but a window saves no work."""
    queries, keys = q.shape[2], k.shape[2]
    if window is not None and window >= keys:
        window = None
    if window is None and queries == keys and documents is None:
        return scaled_dot_product(q, k, v, is_causal=True)
    # is_causal would align the triangle with the first key instead of the last
    if documents is None:
        mask = make_band_mask(queries, keys, window, q.device)
    else:
        mask = documents.cached(
            ("sdpa", window), lambda: _make_document_band_mask(documents, keys, window)
        )
    return scaled_dot_product(q, k, v, mask)


def make_band_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return (queries, keys) of bool: which of the keys, up to the last query, each query sees."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries - window + 1)


def _make_document_band_mask(documents: DocumentMask, count: int, window: int | None) -> Tensor:
    """Return (B, 1, count, count) of bool: the tokens that each token sees."""
    band = make_band_mask(count, count, window, documents.ids.device)
    return band & documents.same_document(slice(0, count), slice(0, count))


MIN_QUERY_BLOCK = 64
"""Queries of one block, where the window is shorter."""


def attend_windowed_blocks(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: DocumentMask | None = None
) -> Tensor:
    """Attend in blocks of Q queries, which read only the Q + window - 1 keys that they see.

    The work is proportional to tokens times (Q + window) instead of tokens squared. On CPU the
    loop over blocks is faster than one batched call.
    """
    assert window is not None, "an unbounded window has no blocks"
    queries, past = q.shape[2], k.shape[2] - q.shape[2]
    block_size = max(window, MIN_QUERY_BLOCK)
    masks: dict[tuple[int, int], Tensor] = {}  # all inner blocks share one
    blocks = []
    for start in range(0, queries, block_size):
        end = min(start + block_size, queries)
        low, high = max(0, past + start - window + 1), past + end
        shape = (end - start, high - low)
        if shape not in masks:
            masks[shape] = make_band_mask(*shape, window, q.device)
        mask = masks[shape]
        if documents is not None:
            mask = mask & documents.same_document(slice(start, end), slice(low, high))
        parts = q[:, :, start:end], k[:, :, low:high], v[:, :, low:high]
        blocks.append(scaled_dot_product(*parts, mask))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


FLEX_BLOCK = 128


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: DocumentMask | None = None
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
            ("flex", window), lambda: _make_document_block_mask(documents, window)
        )
    elif is_compiling:
        mask = _make_block_mask(queries, keys, window, q.device)
    else:
        mask = _cached_block_mask(queries, keys, window, q.device)
    if is_compiling or q.device.type != "cuda":
        is_grouped = q.shape[1] != k.shape[1]
        out: Tensor = flex_attention(q, k, v, block_mask=mask, enable_gqa=is_grouped)
        return out
    return attend_compiled_flex(q, k, v, window, documents, mask)


FLEX_SHAPES = 64
"""Shapes for which the kernel is compiled, each once. torch's own limit is 8."""


def attend_compiled_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    documents: DocumentMask | None,
    mask: BlockMask | None,
) -> Tensor:
    """Run the kernel of these shapes, compiled at their first use.

    Once there are `FLEX_SHAPES` of them, torch would go on with flex_attention's unfused form,
    which holds the scores of all queries and keys. Other backends take its place here.
    """
    note_kernel("flex")
    limits = {"recompile_limit": FLEX_SHAPES, "fail_on_recompile_limit_hit": True}
    try:
        with torch._dynamo.config.patch(limits):
            out: Tensor = _compile_flex()(
                q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
            )
    except FailOnRecompileLimitHit:
        _warn_of_shapes(FLEX_SHAPES)
        attend = attend_windowed_blocks if _is_windowed(k, window) else attend_sdpa
        out = attend(q, k, v, window, documents)
    return out


@lru_cache(maxsize=1)
def _compile_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=1)
def _warn_of_shapes(limit: int) -> None:
    text = f"over {limit} shapes of attention in one process: no more are compiled"
    _log.warning("%s, and windows are computed in blocks, slower", text)


@lru_cache(maxsize=64)
def _cached_block_mask(queries: int, keys: int, window: int, device: torch.device) -> BlockMask:
    return _make_block_mask(queries, keys, window, device)


def _make_block_mask(queries: int, keys: int, window: int, device: torch.device) -> BlockMask:
    past = keys - queries

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + past - key
        return (distance >= 0) & (distance < window)

    return create_block_mask(
        is_visible, None, None, queries, keys, device=str(device), BLOCK_SIZE=FLEX_BLOCK
    )


def _make_document_block_mask(documents: DocumentMask, window: int) -> BlockMask:
    """Build the mask of one pass's documents, for all of its layers."""
    ids = documents.ids
    rows, count = ids.shape

    def is_visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query - key
        in_window = (distance >= 0) & (distance < window)
        return in_window & (ids[row, query] == ids[row, key])

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
        lambda q, k, _v, window, documents: (
            q.device.type == "cuda"
            and q.requires_grad  # else each new length would be compiled, for one use
            and torch.is_grad_enabled()
            and q.shape[2] == k.shape[2]
            and (documents is not None or _is_windowed(k, window))
        ),
    ),
    "windowed_blocks": Backend(
        attend_windowed_blocks, lambda _q, k, _v, window, _documents: _is_windowed(k, window)
    ),
    "sdpa": Backend(attend_sdpa, lambda *_: True),
}
"""In order of preference. To add a backend, add its function and one entry; the contract in
``tests/contracts/attention_backend_contract.py`` says what it must do."""


def select_backend(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: DocumentMask | None = None
) -> str:
    """Return the name of the backend for these arguments."""
    for name, backend in BACKENDS.items():
        if backend.is_best(q, k, v, window, documents):
            return name
    raise AssertionError("the last backend serves every shape")
