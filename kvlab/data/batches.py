"""Batches: windows of a token array, a pure function of (seed, step).

A training reads the whole text once before it reads any of it again, in the order of
`kvlab.data.order`, whatever its batch size. Nothing is remembered between steps, so a resumed
training, another cell at the same seed, and several workers all see the same windows in the same
order.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvlab.data.order import window_starts
from kvlab.errors import DataError

Tokens = npt.NDArray[np.integer]
Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def training_batch(
    tokens: Tokens,
    *,
    seed: int,
    step: int,
    batch_size: int,
    block_size: int,
    rows: slice = slice(None),
) -> Batch:
    """The next ``batch_size`` windows in the order of ``seed``.

    Windows may span documents, which end-of-text tokens part.

    Args:
        tokens: shape (tokens,).
        seed, step: 0 or more; equal pairs give equal batches, on any machine.
        rows: the windows of the batch that are wanted, as of one of several workers.

    Returns:
        x and y, int64, shape (batch_size or fewer, block_size); y is x one token later.

    Raises:
        DataError: ``tokens`` is shorter than one window.
    """
    if len(tokens) <= block_size:
        raise DataError(_too_few("training", len(tokens), block_size))
    numbers = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)[rows]
    starts = window_starts(numbers, tokens=len(tokens), block_size=block_size, seed=seed)
    return _windows(tokens, starts, block_size)


def validation_batches(
    tokens: Tokens, *, tokens_wanted: int, block_size: int, batch_size: int
) -> Iterator[Batch]:
    """Windows side by side from the start: each token but the first is predicted once.

    There are ``tokens_wanted / block_size`` windows, rounded up; the last batch may be smaller.

    Raises:
        DataError: ``tokens`` is too short for them.
    """
    windows = -(-tokens_wanted // block_size)
    if windows < 1 or windows * block_size + 1 > len(tokens):
        raise DataError(_too_few("held-out", len(tokens), windows * block_size))
    return _side_by_side(tokens, windows, block_size, batch_size)


def _side_by_side(
    tokens: Tokens, windows: int, block_size: int, batch_size: int
) -> Iterator[Batch]:
    for first in range(0, windows, batch_size):
        numbers = np.arange(first, min(first + batch_size, windows), dtype=np.int64)
        yield _windows(tokens, numbers * block_size, block_size)


def _windows(tokens: Tokens, starts: npt.NDArray[np.int64], block_size: int) -> Batch:
    found = tokens[starts[:, None] + np.arange(block_size + 1)].astype(np.int64)
    return found[:, :-1].copy(), found[:, 1:].copy()


def _too_few(which: str, there: int, wanted: int) -> str:
    text = f"the text has {there:,} {which} tokens, too few for {wanted:,} and their next"
    if which == "training":
        return f"{text}; give more text, or a smaller model.block_size"
    return f"{text}; raise data.validation_fraction, give more text, or lower the tokens asked for"
