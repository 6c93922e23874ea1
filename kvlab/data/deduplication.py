"""Near-duplicate documents, and passages that the held-out text shares with the training text.

A model that has read a held-out passage is tested on its memory, so a validation loss is lower
than it would be on new text. Near-duplicates are found by MinHash (Broder 1997) with one
permutation (Li et al. 2012, densified as by Shrivastava and Li 2014) and locality-sensitive
hashing. Shared passages are found by hashes of 64 bytes at positions that the text itself selects
(Manber 1994). Both work on bytes, so the choice of documents does not depend on the tokenizer.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

BANDS = 8
"""Two documents are near-duplicates if they agree in one of the bands. A band agrees with the
probability J^4, where J is the Jaccard similarity of the documents' shingles: of pairs with
J = 0.3, 6% are taken for near-duplicates; with 0.6, 67%; with 0.8, 98.5%."""

_BAND_ROWS = 4
_SHINGLE_WORDS = 4
"""A shingle is four words of 8 bytes: 32 bytes, about five words of English."""

PASSAGE_BYTES = 64
_ANCHOR_EVERY = 8
"""On average one byte in this many is an anchor, where a passage is hashed."""

MAX_SHARED = 0.03
"""A held-out document of whose passages more than this share occur in the training text is left
out of the dataset."""

OVERLAP_LENGTHS = (13, 50)
"""Tokens of the passages whose overlap is measured: GPT-3 looked for 13 (Brown et al. 2020), and
Lee et al. (2022) call 50 a duplicate. Theirs are tokens of about four bytes. Where tokens are bytes
they are four times as long: 50 bytes are a dozen words, which texts share by chance."""

_MEASURED_TOKENS = 4_000_000
_NGRAM_CHUNK = 200_000  # so many fit in the processor's cache
_FILTER_BITS = 24
_MULTIPLIERS = np.random.Philox(key=[0x6465647570, 0]).random_raw(8) | np.uint64(1)


def band_hashes(raw: bytes) -> Hashes:
    """Return the bands (`BANDS`,) of a document's MinHash signature.

    Args:
        raw: its text in UTF-8. Case and the amount of white space do not count.
    """
    words = _byte_words(b" ".join(raw.split()).lower().ljust(8 * _SHINGLE_WORDS))
    length = len(words) - 8 * (_SHINGLE_WORDS - 1)
    total = np.zeros(length, np.uint64)
    for index in range(_SHINGLE_WORDS):
        total = total * _MULTIPLIERS[4] + words[8 * index : 8 * index + length]
    shingles = _mix(total)
    rows = BANDS * _BAND_ROWS
    values = np.full(rows, np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(values, (shingles >> np.uint64(32)) % np.uint64(rows), shingles)
    filled = np.flatnonzero(values != np.iinfo(np.uint64).max)
    # an empty row borrows from the next one that is not; the distance keeps borrowers apart
    source = np.searchsorted(filled, np.arange(rows)) % len(filled)
    distance = (filled[source] - np.arange(rows)) % rows
    signature = values[filled[source]] + distance.astype(np.uint64) * _MULTIPLIERS[7]
    weights = _MULTIPLIERS[:_BAND_ROWS]
    return _mix((signature.reshape(BANDS, _BAND_ROWS) * weights).sum(1, dtype=np.uint64))


def find_first_of_kind(hashes: Hashes, bands: npt.NDArray[np.uint64]) -> Bools:
    """Return which documents are neither copies nor near-duplicates of an earlier one.

    Near-duplicates of a document that is itself left out are left out, too: of each chain the
    first remains.
    """
    is_first = np.ones(len(hashes), dtype=bool)
    for column in (hashes, *bands.T):
        _, first = np.unique(column, return_index=True)
        is_first &= np.isin(np.arange(len(hashes)), first)
    return is_first


def shared_passage_shares(
    held_out: Sequence[bytes], training: Iterable[bytes], threads: int
) -> npt.NDArray[np.float64]:
    """Return the share of each held-out document's passages that occur in the training text.

    Args:
        training: training text in UTF-8, in parts of any size; read once. A passage counts if it
            is inside one of them.
    """
    passages = [anchored_passages(raw) for raw in held_out]
    lengths = np.array([len(hashes) for hashes in passages], dtype=np.int64)
    is_shared = _find_occurring(
        np.concatenate([np.empty(0, np.uint64), *passages]),
        (lambda raw=raw: anchored_passages(raw) for raw in training),
        threads,
    )
    owner = np.repeat(np.arange(len(lengths)), lengths)
    counts = np.bincount(owner, weights=is_shared, minlength=len(lengths))
    return np.asarray(counts / np.maximum(lengths, 1), dtype=np.float64)


def anchored_passages(raw: bytes) -> Hashes:
    """Return hashes of the passages of `PASSAGE_BYTES` that begin at the text's anchors."""
    if len(raw) < PASSAGE_BYTES:
        return np.empty(0, np.uint64)
    words = _byte_words(raw)
    starts = words[: len(raw) - PASSAGE_BYTES + 1]
    anchors = np.flatnonzero((starts * _MULTIPLIERS[0]) >> np.uint64(48) < 2**16 // _ANCHOR_EVERY)
    total = np.zeros(len(anchors), np.uint64)
    for index in range(PASSAGE_BYTES // 8):
        total = _mix(total * _MULTIPLIERS[1] + words[anchors + 8 * index])
    return total


def measure_overlap(
    held_out: npt.NDArray[np.integer], training: npt.NDArray[np.integer], length: int, threads: int
) -> float:
    """Return the share of held-out tokens that lie inside an n-gram of the training text.

    Of a large held-out text the first four million tokens are measured.
    """
    held_out = np.asarray(held_out[:_MEASURED_TOKENS])
    if len(held_out) < length:
        return 0.0
    starts = range(0, len(training) - length + 1, _NGRAM_CHUNK)
    size = _NGRAM_CHUNK + length - 1
    is_shared = _find_occurring(
        _ngram_hashes(held_out, length),
        (lambda s=s: _ngram_hashes(training[s : s + size], length) for s in starts),
        threads,
    )
    edges = np.zeros(len(held_out) + 1, dtype=np.int64)
    found = np.flatnonzero(is_shared)
    edges[found] += 1
    edges[found + length] -= 1
    return float((np.cumsum(edges[:-1]) > 0).mean())


def _find_occurring(wanted: Hashes, parts: Iterator[Any], threads: int) -> Bools:
    """Return which of ``wanted`` occur in ``parts``, which are functions that return hashes."""
    values, inverse = np.unique(wanted, return_inverse=True)
    occurs = np.zeros(len(values), dtype=bool)
    if not len(values):
        return occurs
    # most hashes of the training text are ruled out by a table of bits, at one read each
    table = np.zeros(2**_FILTER_BITS, dtype=bool)
    table[values >> np.uint64(64 - _FILTER_BITS)] = True

    def mark(part: Any) -> None:
        hashes = part()
        hashes = hashes[table[hashes >> np.uint64(64 - _FILTER_BITS)]]
        places = np.minimum(np.searchsorted(values, hashes), len(values) - 1)
        occurs[places[values[places] == hashes]] = True

    with ThreadPoolExecutor(threads) as pool:
        while batch := list(islice(parts, 2 * threads)):  # map alone would read all parts at once
            list(pool.map(mark, batch))
    return np.asarray(occurs[inverse.reshape(-1)])


def _ngram_hashes(tokens: npt.NDArray[np.integer], length: int) -> Hashes:
    """Return the hash of the ``length`` tokens from each position, by repeated doubling."""
    powers = np.asarray(tokens).astype(np.uint64) + np.uint64(1)  # hashes of 1, 2, 4, ... tokens
    count = len(powers) - length + 1
    result = np.zeros(max(0, count), np.uint64)
    offset, size = 0, 1
    while size <= length:
        if length & size:
            result = _mix(result * _MULTIPLIERS[2] + powers[offset : offset + count])
            offset += size
        pairs = max(0, len(powers) - size)
        powers = _mix(powers[:pairs] * _MULTIPLIERS[3] + powers[size : size + pairs])
        size *= 2
    return result


def _byte_words(raw: bytes) -> Hashes:
    """Return the 8 bytes from each position as one number, (len(raw) - 7,)."""
    return np.ndarray(len(raw) - 7, "<u8", raw, strides=(1,)).astype(np.uint64)


def _mix(words: Hashes) -> Hashes:
    """Mix the bits of each word: the first half of SplitMix64's finalizer (Steele et al. 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return words ^ (words >> np.uint64(27))
