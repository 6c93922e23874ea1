"""Attention of one token to what a cache has stored.

K and V are values or codes. `Keys` may be stored before their rotation, or in two parts.

Shapes: B rows, H heads of K and V, C queries of one such head, T or S stored tokens, D width, R
width of what all heads share.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.cache import Numbers, Rotated, ScaledCodes, Stored
from kvlab.cache.attention_pass import softmax_with_sink
from kvlab.model.attention_backends import note_kernel, scaled_dot_product
from kvlab.model.kernels.rotate_pairs import rotate_into
from kvlab.model.kernels.triton_kernels import MAX_WIDTH, attend_stored
from kvlab.model.kernels.triton_runtime import are_kernels_usable
from kvlab.model.rope import RopeTable, apply_rope

BLOCK_NUMBERS = 2**17
"""Codes that are converted, or numbers that are rotated, at a time on CPU. As float32 they fit a
core's cache."""

COMPILED_PARTS = 8
"""The largest number of parts in the graph of a compiled step."""


def decode_stored(stored: Stored, dtype: torch.dtype) -> Tensor:
    """Return values (B, H, T, D), of ``dtype`` where they are stored as codes."""
    return stored if isinstance(stored, Tensor) else stored.decode(dtype)


class Keys(NamedTuple):
    """Keys (B, H, T, R + D) as they are stored.

    Attributes:
        stored: (B, H, T, D or more), of each head.
        table: the rotations at their positions, where they are stored unrotated.
        shared: (B, 1, T, R), numbers of all heads' keys before those of each.
        width: D, how many of a vector's first numbers are its key; default all.
    """

    stored: Stored
    table: RopeTable | None = None
    shared: Stored | None = None
    width: int | None = None

    @property
    def own_width(self) -> int:
        return self.width or self.stored.shape[3]

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """Return the keys, rotated and joined, of ``dtype`` where they are stored as codes."""
        keys = apply_rope(decode_stored(self.stored, dtype), self.table)
        if self.width is not None:
            keys = keys[..., : self.width]
        if self.shared is None:
            return keys
        shared = decode_stored(self.shared, dtype).expand(-1, keys.shape[1], -1, -1)
        return torch.cat([shared, keys], -1)


DECODE_KERNEL = "triton_decode"
"""The name of the CUDA kernel by which one token attends."""


def attend_decoded(
    q: Tensor, k: Keys, v: Stored, mask: Tensor | None, sink: Tensor | None, counts: Tensor | None
) -> Tensor:
    """Attend one token's queries (B, H, C, D) to K and V (B, H, S, D) of as many heads.

    Args:
        mask: (B or 1, 1, 1, S), added to the scores, or of bool and true where a query sees a key.
        sink: (H, C) logits that join the denominators; or None.
        counts: (B,) with a mask: how many keys each row sees, from the first on; or None.
    """
    stored, shared_keys = k.stored, k.shared
    if isinstance(stored, Rotated) or isinstance(shared_keys, Rotated) or isinstance(v, Rotated):
        return _attend_rotated(q, k, v, mask, sink, counts)
    if attends_by_triton(q, k, v) and (mask is None or counts is not None):
        note_kernel(DECODE_KERNEL)
        return attend_stored(q, stored, v, counts, sink, table=k.table, shared=shared_keys)
    if attends_in_blocks(q, k, v, mask):
        note_kernel("scaled_codes" if isinstance(v, ScaledCodes) else "rotated_blocks")
        return attend_blocks(q, k, v, mask, sink)
    values = decode_stored(v, q.dtype)
    # Score the shared part by itself, so that the large part is not copied. In half precision the
    # scores would be rounded when they join the mask: then copy, unless the large part is V.
    width = k.own_width
    if k.shared is not None and (q.dtype.itemsize >= 4 or width == v.shape[3]):
        shared, own = torch.split(q, [k.shared.shape[3], width], -1)
        keys = values if k.stored is v else decode_stored(k.stored, q.dtype)
        scores = _score_shared(shared, decode_stored(k.shared, q.dtype)) * q.shape[-1] ** -0.5
        own = own * math.sqrt(width / q.shape[-1])  # it is divided by the root of its own width
        if mask is not None and mask.dtype == torch.bool:
            mask = scores.masked_fill(~mask, -math.inf)
        else:
            mask = scores if mask is None else scores + mask
        return scaled_dot_product(own, keys[..., :width], values, mask, sink=sink)
    is_value = k.stored is v and k.table is None and k.shared is None
    keys = values if is_value else k.to_dense(q.dtype)
    return scaled_dot_product(q, keys, values, mask, sink=sink)


def _attend_rotated(
    q: Tensor, k: Keys, v: Stored, mask: Tensor | None, sink: Tensor | None, counts: Tensor | None
) -> Tensor:
    """Attend to what is stored in another basis by queries in it.

    Where positions rotate keys as they are read, or a key is a part of a vector, what is stored is
    rotated back first.
    """
    keys, shared = k.stored, k.shared
    if (
        isinstance(keys, Rotated)
        and isinstance(v, Rotated)
        and (shared is None or isinstance(shared, Rotated))
        and k.table is None
        and k.width is None
    ):
        widths = [0 if shared is None else shared.shape[3], k.own_width]
        of_shared, own = torch.split(q, widths, -1)
        q = own @ keys.matrix.to(q.dtype)
        rotated = Keys(v.stored if keys is v else keys.stored)
        if shared is not None:
            q = torch.cat([of_shared @ shared.matrix.to(q.dtype), q], -1)
            rotated = rotated._replace(shared=shared.stored)
        y = attend_decoded(q, rotated, v.stored, mask, sink, counts)
        return y @ v.matrix.to(y.dtype)
    values = decode_stored(v, q.dtype)
    decoded = k._replace(
        stored=values if keys is v else decode_stored(keys, q.dtype),
        shared=None if shared is None else decode_stored(shared, q.dtype),
    )
    return attend_decoded(q, decoded, values, mask, sink, counts)


def attends_by_triton(q: Tensor, k: Keys, v: Stored) -> bool:
    """Return whether one token's queries (B, H, C, D) attend by Triton's kernel.

    torch's attention with a mask does not split a text among processors, so a small batch leaves
    most of them idle.
    """
    if not are_kernels_usable(q.device):
        return False
    stored = (k.stored, v, *([] if k.shared is None else [k.shared]))
    kinds = {
        part.codes.dtype.is_floating_point if isinstance(part, ScaledCodes) else None
        for part in stored
    }
    return (
        q.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and max(part.shape[3] for part in stored) <= MAX_WIDTH
        and len(kinds) == 1  # it converts all that it reads alike
        and not (torch.is_grad_enabled() and q.requires_grad)
    )


def attends_in_blocks(q: Tensor, k: Keys, v: Stored, mask: Tensor | None) -> bool:
    """Return whether one token's queries (B, H, C, D) attend by `attend_blocks`.

    In half precision torch would round products of codes before they are scaled.
    """
    if q.device.type != "cpu" or (mask is not None and mask.dtype != torch.bool):
        return False
    if torch.is_grad_enabled() and q.requires_grad:
        return False
    if k.table is not None and torch.compiler.is_compiling():
        return False
    return q.dtype.itemsize >= 4 if isinstance(v, ScaledCodes) else k.table is not None


def attend_blocks(
    q: Tensor, k: Keys, v: Stored, mask: Tensor | None, sink: Tensor | None = None
) -> Tensor:
    """Attend queries (B, H, C, D) to K and V of as many heads, some heads at a time.

    Codes are converted, and keys rotated, in blocks that fit a core's cache. Allocating memory for
    all of them at once would take longer.

    Args:
        mask: (B or 1, 1, 1, S) of bool, true where a query sees; or None.
        sink: (H, C) logits that join the denominators; or None.
    """
    batch, heads, count, width = q.shape
    q, of_shared = q * width**-0.5, None
    if k.shared is not None:
        shared, q = torch.split(q, [k.shared.shape[3], k.own_width], -1)
        of_shared = _score_shared(shared, k.shared).flatten(0, 1)
    queries, values = q.flatten(0, 1), _flatten_heads(v)
    keys = values if k.stored is v else _flatten_heads(k.stored)
    key_scale, value_scale = _find_scale(keys), _find_scale(values)
    hidden = None if mask is None else (~mask).expand(batch, heads, 1, -1).flatten(0, 1)
    sinks = None if sink is None else sink.expand(batch, -1, -1).flatten(0, 1)
    parts = []
    for part in _split_heads(values):
        value_block = _convert(values, part, q.dtype)
        key_block = value_block if keys is values else _convert(keys, part, q.dtype)
        if k.table is None:
            scores = queries[part] @ key_block[..., : queries.shape[-1]].mT
        else:
            scores = _score_rotated(queries[part], key_block, k.table, part, heads)
        if key_scale is not None:
            scores *= key_scale[part]
        if of_shared is not None:
            scores += of_shared[part]
        if hidden is not None:
            scores.masked_fill_(hidden[part], -torch.inf)
        weights = softmax_with_sink(scores[None], None if sinks is None else sinks[part])[0]
        if value_scale is not None:
            weights = weights * value_scale[part]
        parts.append(weights.to(value_block.dtype) @ value_block)
    return _join(parts).view(batch, heads, count, -1)


def _score_rotated(q: Tensor, keys: Tensor, table: RopeTable, part: slice, heads: int) -> Tensor:
    """Return the products (N, C, S) of queries (N, C, D) with keys (N, S, D), rotated first.

    Args:
        table: the rotations (S, R/2), or of each row (B, 1, S, R/2).
        part: which of the rows' heads these are.
        heads: of a row.
    """
    if table.cos.dim() == 4:
        rows = torch.arange(part.start, part.stop, device=q.device) // heads
        table = RopeTable(table.cos[rows, 0], table.sin[rows, 0])
    rotary_dim = 2 * table.cos.shape[-1]
    unrotated = keys[..., :rotary_dim]
    rotated = rotate_into(table.cos.new_empty(unrotated.shape), unrotated, *table)
    scores = q[..., :rotary_dim] @ rotated.mT
    if rotary_dim < q.shape[-1]:
        scores.baddbmm_(q[..., rotary_dim:], keys[..., rotary_dim:].mT)
    return scores


def _score_shared(q: Tensor, stored: Stored) -> Tensor:
    """Return the products (B, H, C, T) of queries (B, H, C, R) with keys (B, 1, T, R)."""
    batch, heads, count, _ = q.shape
    queries, keys = q.flatten(1, 2), _flatten_heads(stored)
    parts = [queries[part] @ _convert(keys, part, q.dtype).mT for part in _split_heads(keys)]
    products, scale = _join(parts), _find_scale(keys)
    products = products if scale is None else products * scale
    return products.view(batch, heads, count, -1)


def _flatten_heads(stored: Stored) -> Numbers:
    """Return (B, H, S, D) as (B * H, S, D)."""
    assert not isinstance(stored, Rotated), "queries are rotated, or what is stored back"
    if isinstance(stored, ScaledCodes):
        return ScaledCodes(*(part.flatten(0, 1) for part in stored))
    return stored.flatten(0, 1)


def _split_heads(stored: Numbers) -> list[slice]:
    """Return the heads of (N, S, D) that are converted at a time: all of them on a GPU.

    A compiled step has few parts, since its graph repeats the operations for each of them.
    """
    number, *rest = stored.shape
    device = (stored.codes if isinstance(stored, ScaledCodes) else stored).device
    size = BLOCK_NUMBERS // max(1, math.prod(rest)) if device.type == "cpu" else number
    if torch.compiler.is_compiling():
        size = max(size, -(-number // COMPILED_PARTS))
    size = max(1, size)
    return [slice(start, min(start + size, number)) for start in range(0, number, size)]


def _find_scale(stored: Numbers) -> Tensor | None:
    """Return the scales (N, 1, S) of codes (N, S, D) that have one for a whole vector."""
    if isinstance(stored, ScaledCodes) and stored.scales.shape[-1] == 1:
        return stored.scales.mT
    return None


def _convert(stored: Numbers, heads: slice, dtype: torch.dtype) -> Tensor:
    """Return values of some heads of (N, S, D), without the scales that `_find_scale` returns."""
    if not isinstance(stored, ScaledCodes):
        return stored[heads]
    part = ScaledCodes(stored.codes[heads], stored.scales[heads])
    return part.decode(dtype) if _find_scale(part) is None else part.convert(dtype)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
