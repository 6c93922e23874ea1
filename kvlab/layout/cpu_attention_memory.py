"""What attention on CPU keeps of a training's forward pass: the probabilities of every pair that
its tiles read. The arithmetic of `kvlab.model.kernels.tiled_attention`, which says why."""

from collections.abc import Iterator

QUERY_TILE = 64
"""Queries of one tile; it reads the keys which any of them sees."""

MIN_HEAD_DIM, MIN_LENGTH = 16, 256
MAX_BFLOAT16_LENGTH = 1024
"""The most tokens in bfloat16 that see all before them."""

MAX_SAVED_BYTES = 128 * 2**20
"""The most that one layer keeps."""

_ITEM = 4
"""float32, whatever the training's precision."""


def query_tiles(length: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """First query, end of queries, and first key that any of them sees."""
    for start in range(0, length, QUERY_TILE):
        low = 0 if window is None else max(0, start - window + 1)
        yield start, min(start + QUERY_TILE, length), low


def saved_probability_bytes(
    rows: int, heads: int, head_dim: int, length: int, window: int | None, *, reduced: bool
) -> int:
    """Of one layer for ``rows`` sequences of ``length`` tokens; 0 where another backend is faster.

    Args:
        window: of a local layer; None sees all before.
        reduced: the training is in bfloat16.
    """
    if length < MIN_LENGTH or head_dim < MIN_HEAD_DIM:
        return 0
    is_whole = window is None or window >= length
    if reduced and is_whole and length > MAX_BFLOAT16_LENGTH:
        return 0
    pairs = sum((end - start) * (end - low) for start, end, low in query_tiles(length, window))
    kept = _ITEM * rows * heads * pairs
    return kept if kept <= MAX_SAVED_BYTES else 0
