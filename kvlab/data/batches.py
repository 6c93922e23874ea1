"""The order in which a training reads its windows: computed where it is needed, never stored.

Every epoch reads the text once, as windows side by side in an order of its own. The windows of an
epoch start at an offset of its own too, so that later epochs cut the text elsewhere. Both are a
pure function of (seed, epoch).
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvlab.errors import DataError

IndexArray = npt.NDArray[np.int64]

_SHUFFLE_STREAM = 0x6B766C6162  # keeps these draws apart from other uses of the same seed
_FEISTEL_ROUNDS = 6


def window_starts(numbers: IndexArray, *, tokens: int, block_size: int, seed: int) -> IndexArray:
    """Where the windows of these running numbers begin; window 0 is the training's first.

    An epoch has ``tokens // block_size - 1`` windows (at least one): up to one window's tokens
    are left out of it, at the ends of the text.

    Args:
        numbers: 0 or more, shape (windows,).
        tokens: of the whole text, more than ``block_size``.
        block_size: tokens of a window; one more follows it as the last target.
        seed: of the order.
    """
    size = max(1, tokens // block_size - 1)
    offsets = min(block_size, tokens - size * block_size)
    epochs = numbers // size
    starts = np.empty_like(numbers)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        # Philox is a pure function of key and counter (Salmon et al., SC 2011), and its raw words
        # are stable between versions of numpy, as what Generator makes of them is not.
        philox = np.random.Philox(key=[_SHUFFLE_STREAM, seed], counter=[0, 0, 0, int(epoch)])
        first, *keys = philox.random_raw(1 + _FEISTEL_ROUNDS)
        places = permute_indices(numbers[here] - epoch * size, size, keys)
        starts[here] = int(first % np.uint64(offsets)) + places * block_size
    return starts


def permute_indices(numbers: IndexArray, size: int, keys: list[np.uint64]) -> IndexArray:
    """The places of ``numbers`` in a pseudo-random permutation of ``range(size)``.

    A Feistel network (Luby and Rackoff 1988), one round a key, permutes the numbers of 2 h bits;
    what falls outside ``size`` goes through again until it is inside (Black and Rogaway 2002).
    """
    half = np.uint64(max(1, (size - 1).bit_length() + 1 >> 1))
    mask = np.uint64((1 << int(half)) - 1)
    found = numbers.astype(np.uint64)
    outside = np.ones(len(found), dtype=bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & mask
        for key in keys:
            left, right = right, left ^ (_splitmix64(right + key) & mask)
        found[outside] = (left << half) | right
        outside = found >= np.uint64(size)
    return found.astype(np.int64)


def _splitmix64(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of a word spread over all of it: the finalizer of SplitMix64 (Steele et al.
    2014), whose products wrap around."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


# Batches: windows of a token array, a pure function of (seed, step).
#
# A training reads the whole text once before it reads any of it again, in the order of
# `kvlab.data.batches`, whatever its batch size. Nothing is remembered between steps, so a resumed
# training, another cell at the same seed, and several workers all see the same windows in the same
# order.


Tokens = npt.NDArray[np.integer]
Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def get_training_batch(
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
        raise DataError(_too_few_tokens("training", len(tokens), block_size))
    numbers = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)[rows]
    starts = window_starts(numbers, tokens=len(tokens), block_size=block_size, seed=seed)
    return _gather_windows(tokens, starts, block_size)


def iter_validation_batches(
    tokens: Tokens, *, tokens_wanted: int, block_size: int, batch_size: int
) -> Iterator[Batch]:
    """Windows side by side from the start: each token but the first is predicted once.

    There are ``tokens_wanted / block_size`` windows, rounded up; the last batch may be smaller.

    Raises:
        DataError: ``tokens`` is too short for them.
    """
    windows = -(-tokens_wanted // block_size)
    if windows < 1 or windows * block_size + 1 > len(tokens):
        raise DataError(_too_few_tokens("held-out", len(tokens), windows * block_size))
    return _iter_adjacent_windows(tokens, windows, block_size, batch_size)


def _iter_adjacent_windows(
    tokens: Tokens, windows: int, block_size: int, batch_size: int
) -> Iterator[Batch]:
    for first in range(0, windows, batch_size):
        numbers = np.arange(first, min(first + batch_size, windows), dtype=np.int64)
        yield _gather_windows(tokens, numbers * block_size, block_size)


def _gather_windows(tokens: Tokens, starts: npt.NDArray[np.int64], block_size: int) -> Batch:
    found = tokens[starts[:, None] + np.arange(block_size + 1)].astype(np.int64)
    return found[:, :-1].copy(), found[:, 1:].copy()


def _too_few_tokens(which: str, there: int, wanted: int) -> str:
    text = f"the text has {there:,} {which} tokens, too few for {wanted:,} and their next"
    if which == "training":
        return f"{text}; give more text, or a smaller model.block_size"
    return f"{text}; raise data.validation_fraction, give more text, or lower the tokens asked for"
