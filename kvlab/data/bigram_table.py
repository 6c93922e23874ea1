"""What tables of single tokens and of pairs score on held-out text: a floor for every model.

A model that does not beat a bigram table of the text that it was trained on has not learned to use
its context, and how its cells differ is mostly noise.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvlab.data.batches import IndexArray, ScoredText, Tokens, gather_windows, order_windows
from kvlab.spec.source_options import WHOLE, TextPart

MAX_TOKENS = 20_000_000
"""The most training tokens that are counted, in the order of the training. More would take long,
and a model that has read as many beats their table."""

_TUNING_SHARE = 0.05
_STRENGTHS = 2.0 ** np.arange(0, 17, 0.5)
_CHUNK_TOKENS = 1_000_000
_KT = 0.5

Floats = npt.NDArray[np.float64]


def score_tables(
    train: Tokens,
    text: ScoredText,
    *,
    seed: int,
    windows: int,
    vocab_size: int,
    parts: Sequence[TextPart] = WHOLE,
) -> dict[str, float]:
    """Score tables of the training text that a model has seen, of tokens and of their pairs.

    p(w | c) = (n(c, w) + s p(w)) / (n(c) + s), the hierarchical Dirichlet model of MacKay and Peto
    (1995), and p(w) with half a count added to each token (Krichevsky and Trofimov 1981). The
    strength s is the best one for the last twentieth of the training text under counts of the
    rest; the table then counts all of it.

    Args:
        train: token ids, (tokens,).
        text: what is scored.
        seed, windows: the training's first ``windows`` windows of ``text.block_size`` tokens, as
            `get_training_batch` orders them. Each is counted once, whatever the epochs.
        vocab_size: of the tokenizer.
        parts: what ``train`` is made of.

    Returns:
        losses in nats per token and the training tokens that were counted, by the names of
        `kvlab.store.metrics`.
    """
    block = text.block_size
    windows = min(windows, max(1, len(train) // block - 1), max(1, MAX_TOKENS // block))
    indices = np.arange(windows, dtype=np.int64)
    starts = order_windows(train, indices, block_size=block, seed=seed, parts=parts)
    tuning = max(1, int(windows * _TUNING_SHARE))
    scored = _Pairs(text.inputs(), text.targets(), vocab_size)
    own = replace(text, tokens=train, starts=starts[-tuning:], repeated=0)
    tuned = _Pairs(own.inputs(), own.targets(), vocab_size)
    counts = _Counts(np.union1d(scored.keys, tuned.keys), vocab_size)
    counts.add(train, starts[:-tuning], block)
    losses = [counts.bigram_loss(tuned, strength) for strength in _STRENGTHS]
    strength = float(_STRENGTHS[int(np.argmin(losses))])
    counts.add(train, starts[-tuning:], block)
    unigram = float(-np.log(counts.unigram()[scored.targets]).mean())
    bigram = counts.bigram_loss(scored, strength)
    return {"loss_unigram": unigram, "loss_bigram": bigram, "bigram_tokens": windows * block}


class _Pairs:
    """Tokens and their next ones, (pairs,), and one key for each pair."""

    def __init__(self, inputs: IndexArray, targets: IndexArray, vocab_size: int):
        self.inputs, self.targets = inputs.ravel(), targets.ravel()
        self.keys: IndexArray = self.inputs * vocab_size + self.targets


class _Counts:
    """How often tokens, and the pairs of ``keys``, occur in the text that was added."""

    def __init__(self, keys: IndexArray, vocab_size: int):
        self._keys, self._vocab_size = keys, vocab_size
        self._pairs = np.zeros(len(keys))
        self._contexts = np.zeros(vocab_size)
        self._tokens = np.zeros(vocab_size)

    def add(self, train: Tokens, starts: IndexArray, block_size: int) -> None:
        """Count the windows that begin at ``starts``."""
        rows = max(1, _CHUNK_TOKENS // block_size)
        for first in range(0, len(starts), rows):
            windows = gather_windows(train, starts[first : first + rows], block_size)
            pairs = _Pairs(*windows, self._vocab_size)
            self._contexts += np.bincount(pairs.inputs, minlength=self._vocab_size)
            self._tokens += np.bincount(pairs.targets, minlength=self._vocab_size)
            # a sorted chunk is looked up many times faster
            keys, counts = np.unique(pairs.keys, return_counts=True)
            places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            is_known = self._keys[places] == keys
            self._pairs[places[is_known]] += counts[is_known]

    def unigram(self) -> Floats:
        """Return the probability of each token, (vocab_size,)."""
        counts = self._tokens + _KT
        return np.asarray(counts / counts.sum())

    def bigram_loss(self, pairs: _Pairs, strength: float) -> float:
        """Return the mean nats of the targets of ``pairs``, which are among ``keys``."""
        counts = self._pairs[np.searchsorted(self._keys, pairs.keys)]
        prior = strength * self.unigram()[pairs.targets]
        probabilities = (counts + prior) / (self._contexts[pairs.inputs] + strength)
        return float(-np.log(probabilities).mean())
