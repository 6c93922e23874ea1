"""What tables of single tokens and of pairs score on held-out text: a floor for every model.

A model that does not beat a bigram table of the text that it was trained on has not learned to use
its context, and how its cells differ is mostly noise.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy import sparse  # type: ignore[import-untyped]

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
    own = replace(text, tokens=train, starts=starts[-tuning:], repeated=0)
    counts = _count_pairs(train, starts[:-tuning], block, vocab_size)
    losses = [_measure_bigrams(counts, own, strength) for strength in _STRENGTHS]
    strength = float(_STRENGTHS[int(np.argmin(losses))])
    counts = counts + _count_pairs(train, starts[-tuning:], block, vocab_size)
    unigram = float(-np.log(_smooth_tokens(counts)[text.targets()]).mean())
    bigram = _measure_bigrams(counts, text, strength)
    return {"loss_unigram": unigram, "loss_bigram": bigram, "bigram_tokens": windows * block}


def _count_pairs(
    train: Tokens, starts: IndexArray, block_size: int, vocab_size: int
) -> sparse.csr_array:
    """Return how often each token follows each other one, (vocab_size, vocab_size)."""
    counts = sparse.csr_array((vocab_size, vocab_size))
    rows = max(1, _CHUNK_TOKENS // block_size)
    for first in range(0, len(starts), rows):
        inputs, targets = gather_windows(train, starts[first : first + rows], block_size)
        pairs = np.ones(inputs.size), (inputs.ravel(), targets.ravel())
        counts = counts + sparse.csr_array(pairs, shape=counts.shape)
    return counts


def _smooth_tokens(counts: sparse.csr_array) -> Floats:
    """Return the probability of each token, (vocab_size,)."""
    tokens = counts.sum(axis=0) + _KT
    return np.asarray(tokens / tokens.sum())


def _measure_bigrams(counts: sparse.csr_array, text: ScoredText, strength: float) -> float:
    """Return the mean nats of the targets of a text."""
    inputs, targets = text.inputs(), text.targets()
    prior = strength * _smooth_tokens(counts)[targets]
    contexts = counts.sum(axis=1)[inputs]
    probabilities = (counts[inputs, targets] + prior) / (contexts + strength)
    return float(-np.log(probabilities).mean())
