"""CUDA kernels in Triton: what a token stores, and its attention.

Each has a plain reference in torch, which runs where Triton does not: `kvlab.cache.formats` and
`kvlab.model.decode_attention.attend_decoded`. With ``TRITON_INTERPRET=1`` in the environment the
kernels run on CPU tensors, which is how tests prove them without a GPU.

Shapes: B rows, H K/V heads, G queries of each, S entries, D width of K, Dv of V.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlab.cache import Numbers, ScaledCodes
from kvlab.cache.formats import MAX_SCALE, MIN_SCALE
from kvlab.model.kernels.triton_runtime import jit, tl, triton

BLOCK = 64
"""The most entries that a program reads at a time."""

SHARED_MEMORY = 96 * 2**10
"""What a program may take of a processor, which has 99 KiB under compute capability 8.6 and 8.9."""

QUERY_BYTES = 2**14
"""The queries of a head that a program holds. Of more, each part reads K and V."""

PROGRAMS_PER_PROCESSOR = 4
"""Programs among which the entries of few rows are split, so that all of the GPU reads."""


MAX_WIDTH = 256
"""The widest heads, or latents, that a program holds."""


def attend_stored(
    q: Tensor,
    k: Numbers,
    v: Numbers,
    counts: Tensor | None = None,
    sink: Tensor | None = None,
    splits: int | None = None,
    *,
    table: tuple[Tensor, Tensor] | None = None,
    shared: Numbers | None = None,
) -> Tensor:
    """Attend q (B, H, G, R + D) to k (B, H, S, D) and v (B, H, S, Dv), read once and as they are.

    They are values in the dtype of the queries, or codes. Products have that dtype, too, which
    represents every code exactly; the scale of a whole vector, softmax and sums have float32. A
    text's entries are split among programs, whose results a second kernel joins (Flash-Decoding,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

    Args:
        k: of which the first D numbers count, where it has more.
        counts: (B,) how many of its first entries each row sees, at least one; the others are not
            read. None: all.
        sink: (H, G) logits that join the denominators.
        splits: programs for each row and head; default by the number of the device's processors.
        table: cos and sin, (S, T/2) or (B, 1, S, T/2), by which the first T numbers of k are
            rotated as they are read.
        shared: (B, 1, S, R), numbers of the keys of all heads; R is 0 without it.

    Returns:
        (B, H, G, Dv) in the dtype of ``q``.
    """
    if torch.compiler.is_compiling():
        parts = (part for stored in (k, v, shared) for part in _split_stored(stored))
        out: Tensor = _attend_in_graph(q, *parts, counts, sink, *(table or (None, None)))
        return out
    batch, heads, group, q_width = q.shape
    shared_width = 0 if shared is None else shared.shape[3]
    entries, v_width, width = k.shape[2], v.shape[3], q_width - shared_width
    widths = [max(16, triton.next_power_of_2(size)) for size in (width, v_width, shared_width)]
    count = count_queries(sum(widths[::2] if shared_width else widths[:1]) * q.itemsize)
    if group > count:
        groups = [slice(start, start + count) for start in range(0, group, count)]
        sinks = [None if sink is None else sink[:, some].contiguous() for some in groups]
        return torch.cat([
            attend_stored(q[:, :, some], k, v, counts, logits, splits, table=table, shared=shared)
            for some, logits in zip(groups, sinks, strict=True)
        ], 2)  # fmt: skip
    pairs = batch * heads
    splits = splits or choose_splits(pairs, entries, count_processors(q.device))
    keys, values, shared_keys = (_view_operand(stored) for stored in (k, v, shared))
    width_blocks = widths if shared_width else widths[:2]
    stored_size = (k.codes if isinstance(k, ScaledCodes) else k).itemsize
    block, stages = choose_tiles(
        width_blocks, stored_size, q.itemsize, group, is_rotated=table is not None
    )
    chunk = -(-entries // (splits * block)) * block
    splits = -(-entries // chunk)
    partial = q.new_empty((pairs, splits, group, v_width), dtype=torch.float32)
    stats = q.new_empty((2, pairs, splits, group), dtype=torch.float32)
    out = q.new_empty((batch, heads, group, v_width))
    cos, sin = (None, None) if table is None else (part.contiguous() for part in table)
    rotary_dim = 0 if cos is None else 2 * cos.shape[-1]
    table_row = cos.stride(0) if cos is not None and cos.dim() == 4 else 0
    rows = max(16, triton.next_power_of_2(group))
    _attend_chunk[pairs, splits](
        q.contiguous(), keys.stored, keys.scales, values.stored, values.scales,
        shared_keys.stored, shared_keys.scales, cos, sin, counts, partial, stats,
        heads, entries, chunk, q_width**-0.5, *keys.strides, *keys.scale_strides,
        *values.strides, *values.scale_strides,
        *shared_keys.strides[::2], *shared_keys.scale_strides[::2], table_row,
        group, rows, width, widths[0], v_width, widths[1], shared_width, widths[2], block,
        keys.scale_group, values.scale_group, shared_keys.scale_group,
        keys.half, values.half, shared_keys.half, rotary_dim,
        IS_FLOAT8=isinstance(k, ScaledCodes) and k.codes.dtype.is_floating_point,
        IS_EXACT=q.dtype == torch.float32, num_stages=stages,
    )  # fmt: skip
    _join_chunks[pairs * group,](
        partial, stats, sink, out, heads, splits, pairs * splits * group,
        group, triton.next_power_of_2(splits),
        v_width, triton.next_power_of_2(v_width),
    )  # fmt: skip
    return out


def _split_stored(stored: Numbers | None) -> tuple[Tensor | None, Tensor | None]:
    return stored if isinstance(stored, ScaledCodes) else (stored, None)


# flexible: any strides will do, so the compiler needs no copies of its arguments
@torch.library.custom_op("kvlab::attend_stored", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend_in_graph(
    q: Tensor,
    k: Tensor,
    k_scales: Tensor | None,
    v: Tensor,
    v_scales: Tensor | None,
    shared: Tensor | None,
    shared_scales: Tensor | None,
    counts: Tensor | None,
    sink: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """Run `attend_stored` as one node of a compiled graph."""
    keys, values = _join_stored(k, k_scales), _join_stored(v, v_scales)
    table = None if cos is None or sin is None else (cos, sin)
    shared_keys = None if shared is None else _join_stored(shared, shared_scales)
    return attend_stored(q, keys, values, counts, sink, table=table, shared=shared_keys)


def _join_stored(part: Tensor, scales: Tensor | None) -> Numbers:
    return part if scales is None else ScaledCodes(part, scales)


@_attend_in_graph.register_fake
def _(q: Tensor, k: Tensor, _ks: Any, v: Tensor, vs: Tensor | None, *_: Any) -> Tensor:  # noqa: ARG001
    return q.new_empty(*q.shape[:3], _join_stored(v, vs).shape[3])


class _Operand(NamedTuple):
    """What a kernel takes of values or codes.

    Attributes:
        stored: values, or the bytes of codes.
        scales: of codes.
        scale_group: numbers that share a scale, where a vector has several; or 0.
        half: numbers in the lower halves of bytes, where codes are two in a byte; or 0.
        strides: of ``stored``, from row to row, head to head and entry to entry.
        scale_strides: of ``scales``.
    """

    stored: Tensor | None
    scales: Tensor | None
    scale_group: int
    half: int
    strides: tuple[int, ...]
    scale_strides: tuple[int, ...]


def _view_operand(part: Numbers | None) -> _Operand:
    if isinstance(part, ScaledCodes):
        codes, scales = part.codes.view(torch.int8), part.scales
        scale_group = part.group_size if scales.shape[3] > 1 else 0
        half = codes.shape[3] if part.is_packed else 0
        return _Operand(codes, scales, scale_group, half, codes.stride()[:3], scales.stride()[:3])
    if part is not None and part.stride(3) != 1:
        part = part.contiguous()
    return _Operand(part, None, 0, 0, (0, 0, 0) if part is None else part.stride()[:3], (0, 0, 0))


def choose_tiles(
    widths: Sequence[int], itemsize: int, q_itemsize: int, queries: int, *, is_rotated: bool
) -> tuple[int, int]:
    """Return the entries that a program reads at a time, and the stages of its pipeline.

    In shared memory are the tiles that all stages but one are loading, the queries, and one tile
    that was converted or rotated.

    Args:
        widths: of K, V and, if there is one, what all heads share.
        itemsize: of what is stored.
        queries: of one head.
        is_rotated: keys are loaded a second time, with cos and sin.
    """
    loaded = sum(widths) * itemsize
    if is_rotated:
        loaded += widths[0] * (itemsize + 2 * q_itemsize)
    made = max(widths) * q_itemsize if is_rotated or itemsize != q_itemsize else 0
    held = max(16, triton.next_power_of_2(queries)) * (sum(widths) - widths[1]) * q_itemsize
    for block, stages in itertools.product((BLOCK, BLOCK // 2, 16), (3, 2)):
        if held + block * ((stages - 1) * loaded + made) <= SHARED_MEMORY - 2**13:
            return block, stages
    return 16, 1


def count_queries(query_bytes: int) -> int:
    """Return how many queries of ``query_bytes`` each a program attends for."""
    return max(16, QUERY_BYTES // query_bytes)


def choose_splits(pairs: int, entries: int, processors: int) -> int:
    """Return the number of programs for each row and head that occupies all processors."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // pairs)
    return max(1, min(wanted, -(-entries // (2 * BLOCK))))


@lru_cache
def count_processors(device: torch.device) -> int:
    """Return the streaming multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@jit
def _load_numbers(
    values, scales, entry, is_read, column, is_column,
    entry_stride, scale_stride, dtype: tl.constexpr,
    SCALE_GROUP: tl.constexpr, HALF: tl.constexpr, IS_FLOAT8: tl.constexpr,
):  # fmt: skip
    """Load some numbers of some entries, without the scale of a whole vector."""
    mask = is_read[:, None] & is_column[None, :]
    place = column % HALF if HALF else column
    loaded = tl.load(values + entry[:, None] * entry_stride + place[None, :], mask=mask, other=0)
    if HALF:  # two codes in a byte, the first half of a vector in the lower bits
        loaded = (tl.where(column[None, :] < HALF, loaded, loaded >> 4) & 0xF) - 8
    numbers = _to_numbers(loaded, IS_FLOAT8, dtype)
    if SCALE_GROUP:
        of_groups = scales + entry[:, None] * scale_stride + (column // SCALE_GROUP)[None, :]
        factors = tl.load(of_groups, mask=mask, other=0.0)
        numbers = (numbers.to(tl.float32) * factors.to(tl.float32)).to(dtype)
    return numbers


@jit
def _to_numbers(codes, IS_FLOAT8: tl.constexpr, dtype: tl.constexpr):
    """Convert values, or bytes of int8 or float8 (e4m3), to ``dtype``.

    The bits of a float8 become those of a float16, whose exponents are larger by 8. So they are
    read by GPUs that have no such type, too.
    """
    if IS_FLOAT8:
        bits = codes.to(tl.int16)
        bits = ((bits & 0x7F) << 7) | (bits & -0x8000)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    return codes.to(dtype)


@jit
def _attend_chunk(
    q, k, k_scales, v, v_scales, shared, shared_scales, cos, sin, counts, partial, stats,
    heads, entries, chunk, softmax_scale,
    k_row, k_head, k_entry, ks_row, ks_head, ks_entry,
    v_row, v_head, v_entry, vs_row, vs_head, vs_entry,
    shared_row, shared_entry, ss_row, ss_entry, table_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
    SHARED_WIDTH: tl.constexpr, SHARED_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    K_SCALE_GROUP: tl.constexpr, V_SCALE_GROUP: tl.constexpr, SHARED_SCALE_GROUP: tl.constexpr,
    K_HALF: tl.constexpr, V_HALF: tl.constexpr, SHARED_HALF: tl.constexpr,
    ROTARY_DIM: tl.constexpr, IS_FLOAT8: tl.constexpr, IS_EXACT: tl.constexpr,
):  # fmt: skip
    """Attend the queries of one row and head to one chunk of its entries, not yet normalized."""
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = pair // heads, pair % heads
    start = split * chunk
    end = tl.minimum(start + chunk, entries)
    if counts is not None:
        end = tl.minimum(end, tl.load(counts + row).to(tl.int32))
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    if k_scales is not None:
        k_scales += row * ks_row + head * ks_head
    if v_scales is not None:
        v_scales += row * vs_row + head * vs_head
    queries, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH_BLOCK)
    v_columns, steps = tl.arange(0, V_BLOCK), tl.arange(0, BLOCK)
    is_query, is_column, is_v_column = queries < GROUP, columns < WIDTH, v_columns < V_WIDTH
    q += (pair * GROUP + queries[:, None]) * (SHARED_WIDTH + WIDTH)
    q_mask = is_query[:, None] & is_column[None, :]
    q_tile = tl.load(q + SHARED_WIDTH + columns[None, :], mask=q_mask, other=0.0)
    if SHARED_WIDTH:
        shared += row * shared_row
        if shared_scales is not None:
            shared_scales += row * ss_row
        s_columns = tl.arange(0, SHARED_BLOCK)
        is_s_column = s_columns < SHARED_WIDTH
        s_mask = is_query[:, None] & is_s_column[None, :]
        shared_q = tl.load(q + s_columns[None, :], mask=s_mask, other=0.0)
    if ROTARY_DIM:
        angles: tl.constexpr = ROTARY_DIM // 2
        cos += row * table_row
        sin += row * table_row
        is_first, is_rotated = columns < angles, columns < ROTARY_DIM
        partners = tl.where(is_first, columns + angles, columns - angles)
    precision: tl.constexpr = "ieee" if IS_EXACT else "tf32"
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, V_BLOCK], tl.float32)
    for first in range(start, end, BLOCK):
        entry = (first + steps).to(tl.int64)
        is_read = entry < end
        keys = _load_numbers(
            k, k_scales, entry, is_read, columns, is_column,
            k_entry, ks_entry, q_tile.dtype, K_SCALE_GROUP, K_HALF, IS_FLOAT8,
        )  # fmt: skip
        if ROTARY_DIM:
            partner_keys = _load_numbers(
                k, k_scales, entry, is_read, partners, is_rotated,
                k_entry, ks_entry, q_tile.dtype, K_SCALE_GROUP, K_HALF, IS_FLOAT8,
            )  # fmt: skip
            place = entry[:, None] * angles + (columns % angles)[None, :]
            has_angle = is_read[:, None] & is_rotated[None, :]
            cosine = tl.load(cos + place, mask=has_angle, other=1.0).to(tl.float32)
            sine = tl.load(sin + place, mask=has_angle, other=0.0).to(tl.float32)
            sine = tl.where(is_first[None, :], -sine, sine)
            keys = keys.to(tl.float32) * cosine + partner_keys.to(tl.float32) * sine
            keys = keys.to(q_tile.dtype)
        scores = tl.dot(q_tile, tl.trans(keys), input_precision=precision) * softmax_scale
        if k_scales is not None and K_SCALE_GROUP == 0:
            scales = tl.load(k_scales + entry * ks_entry, mask=is_read, other=0.0)
            scores = scores * scales.to(tl.float32)[None, :]
        if SHARED_WIDTH:
            keys = _load_numbers(
                shared, shared_scales, entry, is_read, s_columns, is_s_column,
                shared_entry, ss_entry, q_tile.dtype, SHARED_SCALE_GROUP, SHARED_HALF, IS_FLOAT8,
            )  # fmt: skip
            more = tl.dot(shared_q, tl.trans(keys), input_precision=precision) * softmax_scale
            if shared_scales is not None and SHARED_SCALE_GROUP == 0:
                scales = tl.load(shared_scales + entry * ss_entry, mask=is_read, other=0.0)
                more = more * scales.to(tl.float32)[None, :]
            scores += more
        scores = tl.where(is_read[None, :], scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        values = _load_numbers(
            v, v_scales, entry, is_read, v_columns, is_v_column,
            v_entry, vs_entry, q_tile.dtype, V_SCALE_GROUP, V_HALF, IS_FLOAT8,
        )  # fmt: skip
        if v_scales is not None and V_SCALE_GROUP == 0:
            scales = tl.load(v_scales + entry * vs_entry, mask=is_read, other=0.0)
            weights = weights * scales.to(tl.float32)[None, :]
        weights = weights.to(q_tile.dtype)
        sums = sums * shrink[:, None] + tl.dot(weights, values, input_precision=precision)
        largest = new_largest
    splits = tl.num_programs(1)
    index = (pair * splits + split) * GROUP + queries
    tl.store(stats + index, largest, mask=is_query)
    tl.store(stats + tl.num_programs(0).to(tl.int64) * splits * GROUP + index, total, mask=is_query)
    tl.store(
        partial + index[:, None] * V_WIDTH + v_columns[None, :],
        sums,
        mask=is_query[:, None] & is_v_column[None, :],
    )


@jit
def _join_chunks(
    partial, stats, sink, out, heads, splits, stats_size,
    GROUP: tl.constexpr, SPLITS_BLOCK: tl.constexpr,
    V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr,
):  # fmt: skip
    """Join what the chunks of one query gave, and its sink, into (Dv,)."""
    query = tl.program_id(0).to(tl.int64)
    pair, member = query // GROUP, query % GROUP
    split, columns = tl.arange(0, SPLITS_BLOCK), tl.arange(0, V_BLOCK)
    index = (pair * splits + split) * GROUP + member
    is_split = split < splits
    maxima = tl.load(stats + index, mask=is_split, other=-float("inf"))
    totals = tl.load(stats + stats_size + index, mask=is_split, other=0.0)
    largest = tl.max(maxima, 0)
    if sink is not None:
        logit = tl.load(sink + (pair % heads) * GROUP + member).to(tl.float32)
        largest = tl.maximum(largest, logit)
    shares = tl.exp(maxima - largest)
    total = tl.sum(shares * totals, 0)
    if sink is not None:
        total += tl.exp(logit - largest)
    sums = tl.load(
        partial + index[:, None] * V_WIDTH + columns[None, :],
        mask=is_split[:, None] & (columns[None, :] < V_WIDTH),
        other=0.0,
    )
    joined = tl.sum(sums * shares[:, None], 0) / total
    tl.store(
        out + query * V_WIDTH + columns, joined.to(out.dtype.element_ty), mask=columns < V_WIDTH
    )


def store_codes(values: Tensor, stored: ScaledCodes, entries: Tensor) -> None:
    """Quantize one token of each row and store it, as `kvlab.cache.formats.Quantized` would.

    That takes a dozen operators, and a token of a small batch takes as long as their number.

    Args:
        values: (B, H, 1, D) of any floating-point dtype.
        stored: codes of int8 or float8 (B, H, S, D), and their scales (B, H, S, G).
        entries: (B,) the entry of each row's token.
    """
    batch, heads, _, _ = values.shape
    width, groups = stored.group_size, stored.scales.shape[3]
    values = values if values.stride(3) == 1 else values.contiguous()
    codes, scales, is_float8 = stored.codes, stored.scales, stored.codes.dtype.is_floating_point
    info = torch.finfo(codes.dtype) if is_float8 else torch.iinfo(codes.dtype)
    _store_row[batch * heads, groups](
        values, codes.view(torch.int8), scales, entries, heads,
        *values.stride()[:2], *codes.stride()[:3], *scales.stride()[:3],
        width, max(16, triton.next_power_of_2(width)), is_float8,
        float(info.max), MIN_SCALE, MAX_SCALE,
    )  # fmt: skip


@jit
def _store_row(
    values, codes, scales, entries, heads, row_stride, head_stride,
    codes_row, codes_head, codes_entry, scales_row, scales_head, scales_entry,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, IS_FLOAT8: tl.constexpr,
    MAX_CODE: tl.constexpr, MIN_SCALE: tl.constexpr, MAX_SCALE: tl.constexpr,
):  # fmt: skip
    """Store the codes and the scale of one group of numbers of one row and head, by divisions that
    are rounded once."""
    pair, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = pair // heads, pair % heads
    entry = tl.load(entries + row).to(tl.int64)
    columns = tl.arange(0, WIDTH_BLOCK)
    is_number = columns < WIDTH
    values += row * row_stride + head * head_stride + group * WIDTH
    x = tl.load(values + columns, mask=is_number, other=0.0)
    x = x.to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), 0), MAX_CODE)
    scale = tl.minimum(tl.maximum(scale, MIN_SCALE), MAX_SCALE).to(tl.float16)
    divisor = tl.zeros([WIDTH_BLOCK], tl.float32) + scale.to(tl.float32)
    x = tl.minimum(tl.maximum(tl.div_rn(x, divisor), -MAX_CODE), MAX_CODE)
    code = _to_float8(x) if IS_FLOAT8 else _to_nearest(x).to(tl.int8)
    codes += row * codes_row + head * codes_head + entry * codes_entry + group * WIDTH
    tl.store(codes + columns, code, mask=is_number)
    scales += row * scales_row + head * scales_head + entry * scales_entry
    tl.store(scales + group, scale)


@jit
def _to_nearest(x):
    """Return x, below 2^22, rounded to whole numbers, ties to even."""
    return (x + 12582912.0) - 12582912.0  # 1.5 x 2^23, from where on a float32 has no fractions


@jit
def _to_float8(x):
    """Return the bytes of float8 (e4m3) nearest to x, ties to even, of magnitudes up to 448."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)  # exponents have a bias of 7 in place of 127
    small = _to_nearest(tl.abs(x) * 512.0).to(tl.int32)  # multiples of 2^-9
    code = tl.where(magnitude < 0x3C800000, small, normal)  # below 2^-6
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)
