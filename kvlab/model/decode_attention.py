"""Attention of one token to what a cache has stored: plain, as codes, or before its rotation.

Shapes: B rows, H heads of K and V, C queries of one such head, T or S stored tokens, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache import ScaledCodes
from kvlab.cache.attention_pass import softmax_with_sink
from kvlab.cache.formats import convert_codes
from kvlab.model.attention_backends import note_kernel, scaled_dot_product
from kvlab.model.kernels.rotate_pairs import rotate_into
from kvlab.model.kernels.triton_kernels import MAX_WIDTH, are_kernels_usable, attend_stored
from kvlab.model.rope import RopeTable, apply_rope

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
    number, rows, columns = codes.shape
    chunk = number if x.device.type != "cpu" else max(1, CODE_CHUNK // (rows * columns))
    if chunk >= number:
        matrix = convert_codes(codes, x.dtype)
        return x @ (matrix.mT if is_transposed else matrix)
    products = []
    for start in range(0, number, chunk):
        matrix = convert_codes(codes[start : start + chunk], x.dtype)
        products.append(x[start : start + chunk] @ (matrix.mT if is_transposed else matrix))
    return torch.cat(products)
