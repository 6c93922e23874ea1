"""The order in which a training reads its windows: computed where it is needed, never stored.

Every epoch reads the text once, as windows side by side in an order of its own. The windows of an
epoch start at an offset of its own too, so that later epochs cut the text elsewhere. Both are a
pure function of (seed, epoch).
"""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_STREAM = 0x6B766C6162  # keeps these draws apart from other uses of the same seed
_ROUNDS = 6


def window_starts(numbers: Numbers, *, tokens: int, block_size: int, seed: int) -> Numbers:
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
        philox = np.random.Philox(key=[_STREAM, seed], counter=[0, 0, 0, int(epoch)])
        first, *keys = philox.random_raw(1 + _ROUNDS)
        places = shuffled(numbers[here] - epoch * size, size, keys)
        starts[here] = int(first % np.uint64(offsets)) + places * block_size
    return starts


def shuffled(numbers: Numbers, size: int, keys: list[np.uint64]) -> Numbers:
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
            left, right = right, left ^ (_mixed(right + key) & mask)
        found[outside] = (left << half) | right
        outside = found >= np.uint64(size)
    return found.astype(np.int64)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of a word spread over all of it: the finalizer of SplitMix64 (Steele et al.
    2014), whose products wrap around."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
