"""The memory of tiled attention on CPU: the probabilities that a training's forward pass saves.

This is the arithmetic of `kvlab.model.kernels.tiled_attention`, without torch.
"""

from collections.abc import Iterator

QUERY_TILE = 64
"""Queries of one tile; it reads every key that any of them sees."""

MIN_HEAD_DIM, MIN_LENGTH = 16, 256
"""Below these another backend is faster."""

MAX_BFLOAT16_LENGTH = 1024
"""Tokens of a sequence in bfloat16 without a window, above which another backend is faster."""

MAX_SAVED_BYTES = 128 * 2**20
"""Of one layer."""

_ITEM_BYTES = 4
"""float32, whatever the training's precision."""


def find_tile_window(window: int | None, sink_tokens: int, *, has_documents: bool) -> int | None:
    """Return the window that tiles follow: none where each document has sinks somewhere."""
    return None if has_documents and sink_tokens else window


def query_tiles(
    length: int, window: int | None, sink_tokens: int = 0
) -> Iterator[tuple[int, int, int]]:
    """Yield for each tile its first query, the end of its queries and the first key it reads.

    A tile reads the sinks as well, unless it reads all keys from the first on.
    """
    for start in range(0, length, QUERY_TILE):
        first_key = 0 if window is None else max(0, start - window + 1)
        if first_key <= sink_tokens:
            first_key = 0
        yield start, min(start + QUERY_TILE, length), first_key


def saved_probability_bytes(
    rows: int,
    heads: int,
    head_dim: int,
    length: int,
    window: int | None,
    sink_tokens: int = 0,
    *,
    is_bfloat16: bool,
    has_sink: bool = False,
) -> int:
    """Return the bytes that one layer saves for ``rows`` sequences of ``length`` tokens.

    Args:
        window: tokens that a query sees, itself included; None: all before it.
        sink_tokens: the first tokens, which it sees beside the window.
        has_sink: a logit joins the denominators, for which no other backend saves less.

    Returns:
        0 where another backend is faster and used instead.
    """
    is_global = window is None or window >= length
    is_slow = length < MIN_LENGTH or head_dim < MIN_HEAD_DIM
    is_slow |= is_bfloat16 and is_global and length > MAX_BFLOAT16_LENGTH
    if is_slow and not has_sink:
        return 0
    pairs = sum(
        (end - start) * (end - first + (sink_tokens if first else 0))
        for start, end, first in query_tiles(length, window, sink_tokens)
    )
    saved = _ITEM_BYTES * rows * heads * pairs
    return saved if has_sink or saved <= MAX_SAVED_BYTES else 0
