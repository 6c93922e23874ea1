"""Batches: windows of a token array, a pure function of (seed, step).

A training reads the whole text once before it reads any of it again, whatever its batch size. The
order is computed where it is needed and never stored. Nothing is remembered between steps, so a
resumed training, another cell at the same seed, and several workers see the same windows in the
same order.

Every epoch reads the text as adjacent windows, in an order and from an offset of its own; both are
a pure function of (seed, epoch). The offset makes later epochs cut the text elsewhere.

A text of several sources lies part after part. No window holds tokens of two parts. Each part has
epochs of its own, and its share of the windows of every few steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvlab.data.tokenizers import Tokenizer
from kvlab.errors import DataError
from kvlab.spec.source_options import WHOLE, TextPart

Tokens = npt.NDArray[np.integer]
IndexArray = npt.NDArray[np.int64]
Batch = tuple[IndexArray, IndexArray]

Ids = TypeVar("Ids")
"""An array of token ids, or a tensor."""

_SHUFFLE_STREAM = 0x6B766C6162
"""Separates these random draws from other uses of the same seed."""

_FEISTEL_ROUNDS = 6

_GOLDEN = (5**0.5 - 1) / 2


def get_training_batch(
    tokens: Tokens,
    *,
    seed: int,
    step: int,
    batch_size: int,
    block_size: int,
    rows: slice = slice(None),
    parts: Sequence[TextPart] = WHOLE,
) -> Batch:
    """Return the windows of one training step.

    Windows may span documents, which end-of-text tokens separate.

    Args:
        seed: Seed of the order, 0 or more.
        step: Training step, 0 or more. Equal (seed, step) give equal batches on any machine.
        rows: The windows of the batch to return, such as one worker's share.
        parts: What ``tokens`` are made of.

    Returns:
        x and y, int64, shape (rows, block_size); y is x shifted by one token.

    Raises:
        DataError: ``tokens`` or a part of them is shorter than one window.
    """
    indices = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)[rows]
    starts = order_windows(tokens, indices, block_size=block_size, seed=seed, parts=parts)
    return gather_windows(tokens, starts, block_size)


def order_windows(
    tokens: Tokens,
    indices: IndexArray,
    *,
    block_size: int,
    seed: int,
    parts: Sequence[TextPart],
) -> IndexArray:
    """Return where the windows with these running indices begin; a training starts at index 0.

    Raises:
        DataError: ``tokens`` or a part of them is shorter than one window.
    """
    ends = find_part_ends(tokens)
    owners, own_indices = divide_windows(indices, [part.weight for part in parts[: len(ends)]])
    starts = np.empty_like(indices)
    for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end - first <= block_size:
            hint = "or a smaller model.block_size"
            raise _too_few_tokens("training", end - first, block_size, hint)
        is_own = owners == number
        starts[is_own] = first + window_starts(
            own_indices[is_own],
            tokens=end - first,
            block_size=block_size,
            seed=seed,
            document_tokens=parts[number].document_tokens,
        )
    return starts


def find_part_ends(tokens: Tokens) -> list[int]:
    """Return where the parts of a text end. An array without parts is one."""
    ends: list[int] = np.cumsum(getattr(tokens, "part_tokens", ()) or [len(tokens)]).tolist()
    return ends


def divide_windows(indices: IndexArray, weights: Sequence[int]) -> tuple[IndexArray, IndexArray]:
    """Return the parts that windows are of, and their running indices in their part.

    Of any n windows that follow each other the last part has its share of n, rounded up or down.
    The other parts divide the rest in the same way.
    """
    owners, own_indices = np.zeros_like(indices), indices.copy()
    is_open = np.ones(len(indices), np.bool_)
    for number in range(len(weights) - 1, 0, -1):
        weight, total = weights[number], sum(weights[: number + 1])
        before = own_indices * weight // total  # windows of this part among the earlier ones
        is_own = is_open & ((own_indices + 1) * weight // total > before)
        own_indices = np.where(is_own, before, np.where(is_open, own_indices - before, own_indices))
        owners[is_own] = number
        is_open &= ~is_own
    return owners, own_indices


def find_targets(tokens: Ids, target_ids: Sequence[range]) -> Ids:
    """Return which tokens are targets, of a text whose other tokens are context alone."""
    found: Any = tokens
    first, *others = target_ids
    is_target: Any = (found >= first.start) & (found < first.stop)
    for one in others:
        is_target |= (found >= one.start) & (found < one.stop)
    chosen: Ids = is_target
    return chosen


@dataclass(frozen=True, eq=False)
class ScoredText:
    """Windows of held-out text that a loss is measured over.

    Attributes:
        starts: Where the windows begin, ascending, shape (windows,).
        block_size: Tokens of a window, each followed by its target.
        repeated: Targets at the beginning of the last window that are in the window before it, and
            count once.
        documents: Indices of the documents of ``tokens`` in the held-out text; None if ``tokens``
            is all of it.
        document_start: The token that begins a document, where documents do not attend to each
            other; else None.
        target_ids: The ids of tokens that are targets; None for all. Others are not scored.
    """

    tokens: Tokens
    starts: IndexArray
    block_size: int
    repeated: int = 0
    documents: IndexArray | None = None
    document_start: int | None = None
    target_ids: tuple[range, ...] | None = None

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.starts)

    @property
    def target_count(self) -> int:
        """The number of tokens that are scored."""
        return len(self.targets())

    @property
    def token_count(self) -> int:
        """The number of tokens of all windows."""
        return len(self.starts) * self.block_size

    def select(self, windows: IndexArray) -> "ScoredText":
        """Return the text of some windows, by their indices."""
        assert not self.repeated, "the last window repeats another one"
        return replace(self, starts=self.starts[windows])

    def flatten(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return each target's value once, (targets,), from values (windows, block_size)."""
        flat = self._drop_repeated(values)
        return flat if self.target_ids is None else flat[self._is_target]

    def _drop_repeated(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        last = len(self) * self.block_size - self.block_size
        flat = values.reshape(-1)
        return np.concatenate([flat[:last], flat[last + self.repeated :]])

    @cached_property
    def _is_target(self) -> npt.NDArray[np.bool_]:
        assert self.target_ids is not None, "without them every token is one"
        following = gather_windows(self.tokens, self.starts, self.block_size)[1]
        return find_targets(self._drop_repeated(following), self.target_ids)

    def inputs(self) -> IndexArray:
        """Return the token before each target, shape (targets,)."""
        return self.flatten(gather_windows(self.tokens, self.starts, self.block_size)[0])

    def targets(self) -> IndexArray:
        """Return the tokens that are scored, shape (targets,)."""
        return self.flatten(gather_windows(self.tokens, self.starts, self.block_size)[1])

    @property
    def window_parts(self) -> IndexArray:
        """The number of the part of the text that each window is of, shape (windows,)."""
        return np.searchsorted(find_part_ends(self.tokens), self.starts, side="right")

    def find_documents(self, ends_of_text: Sequence[int]) -> IndexArray:
        """Return the index in the held-out text of each target's document, shape (targets,)."""
        document_starts = np.flatnonzero(np.isin(self.tokens, ends_of_text))
        targets = self.starts[:, None] + 1 + np.arange(self.block_size)
        found = np.searchsorted(document_starts, self.flatten(targets), side="right") - 1
        return np.asarray(found if self.documents is None else self.documents[found])

    def iter_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield up to ``batch_size`` windows at a time: inputs and targets, (rows, block_size)."""
        for first in range(0, len(self), batch_size):
            starts = self.starts[first : first + batch_size]
            yield gather_windows(self.tokens, starts, self.block_size)


def spread_windows(
    tokens: Tokens, target_tokens: int, block_size: int, parts: Sequence[TextPart] = WHOLE
) -> ScoredText:
    """Return windows that are evenly spaced over a text, of each of ``parts`` its share.

    Equal arguments give equal windows, so all cells of a sweep are scored on the same text.

    Args:
        target_tokens: Tokens to score, 1 or more; rounded up to whole windows.

    Raises:
        DataError: ``tokens`` is too short.
    """
    windows, ends = np.arange(-(-target_tokens // block_size)), find_part_ends(tokens)
    owners, _ = divide_windows(windows, [part.weight for part in parts[: len(ends)]])
    counts = np.bincount(owners, minlength=len(ends)).tolist()
    starts = []
    for first, end, count in zip([0, *ends], ends, counts, strict=False):
        if count * block_size + 1 > end - first:
            hint = "raise data.validation_fraction, or score fewer tokens"
            raise _too_few_tokens("held-out", end - first, count * block_size, hint)
        indices = spread_indices(count, (end - first - 1) // block_size)
        starts.append(first + indices * block_size)
    return ScoredText(tokens, np.concatenate(starts), block_size)


def spread_documents(
    tokens: Tokens, target_bytes: int, block_size: int, tokenizer: Tokenizer
) -> ScoredText:
    """Return whole documents that are spread over a text, in adjacent windows.

    Which documents they are depends on their bytes alone, so every tokenizer and every block size
    scores the same text. The last window begins earlier where it would be shorter.

    Args:
        target_bytes: Bytes of text to score; rounded up to whole documents.

    Raises:
        DataError: ``tokens`` has less text, or the documents are shorter than one window.
    """
    starts = np.flatnonzero(tokens == tokenizer.end_of_text)
    token_bytes = tokenizer.token_bytes().astype(np.uint32)
    sizes = np.add.reduceat(token_bytes[tokens], starts, dtype=np.int64)
    # multiples of the golden ratio: however many are taken, they are spread evenly
    order = np.argsort(np.arange(1, len(starts) + 1) * _GOLDEN % 1.0, kind="stable")
    count = int(np.searchsorted(np.cumsum(sizes[order]), target_bytes)) + 1
    if count > len(starts):
        text = f"the text has {int(sizes.sum()):,} held-out bytes, and evaluation.loss_bytes ="
        hint = "raise data.validation_fraction, give more text, or score fewer bytes"
        raise DataError(f"{text} {target_bytes:,}; {hint}")
    documents = np.sort(order[:count])
    ends = np.append(starts[1:], len(tokens))
    stream = np.concatenate([tokens[starts[i] : ends[i]] for i in documents])
    targets = len(stream) - 1
    if targets < block_size:
        text = f"evaluation.loss_bytes = {target_bytes:,} gives {targets:,} tokens, less than one"
        raise DataError(f"{text} window of model.block_size = {block_size:,}; raise it")
    window_count = -(-targets // block_size)
    firsts = np.minimum(np.arange(window_count) * block_size, targets - block_size)
    repeated = window_count * block_size - targets
    return ScoredText(stream, firsts, block_size, repeated, documents)


def take_documents(tokens: Tokens, part: int, parts: int, end_of_text: int) -> Tokens:
    """Return the documents of one of ``parts`` stretches of a text, about equally long.

    Raises:
        DataError: the text has too few documents, or there is no such part.
    """
    starts = np.flatnonzero(tokens == end_of_text)
    name = f"evaluation.text_parts = {parts}"
    if len(starts) < parts:
        text = f"the text has {len(starts)} held-out documents, fewer than {name}"
        raise DataError(f"{text}; lower it, or raise data.validation_fraction")
    if part >= parts:
        raise DataError(f"there is no part {part} of {name}; use seeds 0 to {parts - 1}")
    cuts = [0]
    for number in range(1, parts):
        nearest = int(np.abs(starts - number * len(tokens) / parts).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1), len(starts) - parts + number))
    ends = [*starts[cuts[1:]].tolist(), len(tokens)]
    own: Tokens = tokens[int(starts[cuts[part]]) : ends[part]]
    return own


def spread_indices(count: int, total: int) -> IndexArray:
    """Return ``count`` different, evenly spaced numbers of ``range(total)``."""
    return np.arange(count, dtype=np.int64) * total // count


def gather_windows(tokens: Tokens, starts: IndexArray, block_size: int) -> Batch:
    """Return inputs and targets of the windows at ``starts``, each (windows, block_size)."""
    windows = tokens[starts[:, None] + np.arange(block_size + 1)].astype(np.int64)
    return windows[:, :-1].copy(), windows[:, 1:].copy()


def _too_few_tokens(split: str, available: int, required: int, hint: str) -> DataError:
    text = f"the text has {available:,} {split} tokens, too few for {required:,} and their next"
    return DataError(f"{text}; give more text, {hint}")


def window_starts(
    indices: IndexArray, *, tokens: int, block_size: int, seed: int, document_tokens: int = 1
) -> IndexArray:
    """Return where the windows with these running indices begin; a training starts at index 0.

    An epoch has ``tokens // block_size - 1`` windows, at least one: up to one window of tokens, at
    the ends of the text, is left out of it.

    Args:
        indices: Running indices of windows, 0 or more, shape (windows,).
        block_size: Tokens per window; one more follows as the last target.
        document_tokens: Windows begin at multiples of it; it divides ``block_size``. Of a text
            whose documents have this length, each window then holds whole documents.
    """
    windows = max(1, tokens // block_size - 1)
    offsets = -(-min(block_size, tokens - windows * block_size) // document_tokens)
    epochs = indices // windows
    starts = np.empty_like(indices)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        # Philox is a pure function of key and counter (Salmon et al., SC 2011). Its raw words are
        # stable between versions of numpy; what Generator makes of them is not.
        philox = np.random.Philox(key=[_SHUFFLE_STREAM, seed], counter=[0, 0, 0, int(epoch)])
        first, *keys = philox.random_raw(1 + _FEISTEL_ROUNDS)
        positions = permute_indices(indices[in_epoch] - epoch * windows, windows, keys)
        offset = int(first % np.uint64(offsets)) * document_tokens
        starts[in_epoch] = offset + positions * block_size
    return starts


def permute_indices(indices: IndexArray, size: int, keys: list[np.uint64]) -> IndexArray:
    """Return the images of ``indices`` under a pseudo-random permutation of ``range(size)``.

    A Feistel network (Luby and Rackoff 1988), with one round per key, permutes the numbers of 2 h
    bits. Images outside ``range(size)`` are permuted again until they are inside (cycle walking,
    Black and Rogaway 2002).
    """
    half = np.uint64(max(1, (size - 1).bit_length() + 1 >> 1))
    mask = np.uint64((1 << int(half)) - 1)
    images = indices.astype(np.uint64)
    outside = np.ones(len(images), dtype=bool)
    while outside.any():
        left, right = images[outside] >> half, images[outside] & mask
        for key in keys:
            left, right = right, left ^ (_splitmix64(right + key) & mask)
        images[outside] = (left << half) | right
        outside = images >= np.uint64(size)
    return images.astype(np.int64)


def _splitmix64(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of each word: SplitMix64's finalizer (Steele et al. 2014), modulo 2^64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
