"""Unigram and bigram tables, against counts in dictionaries."""

import math
from collections import Counter

import numpy as np
import pytest

from kvlab.data.batches import get_training_batch, spread_windows
from kvlab.data.bigram_table import score_tables

BLOCK, VOCABULARY = 16, 40


def markov_text(count, seed):
    rng = np.random.default_rng(seed)
    moves = np.random.default_rng(0).dirichlet(np.full(VOCABULARY, 0.05), VOCABULARY)
    tokens = [0]
    for draw in rng.random(count):
        tokens.append(int(np.searchsorted(moves[tokens[-1]].cumsum(), draw).clip(0, 39)))
    return np.array(tokens, np.uint16)


def seen_pairs(train, seed, windows):
    pairs = []
    for step in range(windows):
        x, y = get_training_batch(train, seed=seed, step=step, batch_size=1, block_size=BLOCK)
        pairs.append(list(zip(x.ravel().tolist(), y.ravel().tolist(), strict=True)))
    return pairs


def table_loss(windows, scored, strength):
    pairs = Counter(pair for window in windows for pair in window)
    contexts = Counter(first for window in windows for first, _ in window)
    tokens = Counter(second for window in windows for _, second in window)
    total = sum(tokens.values()) + VOCABULARY / 2

    def loss(first, second):
        prior = (tokens[second] + 0.5) / total
        count = pairs[first, second] + strength * prior
        return -math.log(prior), -math.log(count / (contexts[first] + strength))

    return np.mean([loss(*pair) for pair in scored], axis=0)


@pytest.mark.parametrize("windows", [1, 7, 100])
def test_tables_are_those_of_dictionaries(windows):
    train, held_out = markov_text(6000, 1), markov_text(900, 2)
    text = spread_windows(held_out, 320, BLOCK)
    tables = score_tables(train, text, seed=5, windows=windows, vocab_size=VOCABULARY)
    seen = seen_pairs(train, 5, windows)
    tuning = max(1, windows // 20)
    strengths = 2.0 ** np.arange(0, 17, 0.5)
    last = [pair for window in seen[-tuning:] for pair in window]
    strength = min(strengths, key=lambda s: table_loss(seen[:-tuning], last, s)[1])
    scored = list(zip(text.inputs().ravel().tolist(), text.targets().ravel().tolist(), strict=True))
    unigram, bigram = table_loss(seen, scored, strength)
    expected = {"loss_unigram": unigram, "loss_bigram": bigram, "bigram_tokens": windows * BLOCK}
    assert tables == pytest.approx(expected)
    once, often = (
        score_tables(train, text, seed=0, windows=count, vocab_size=VOCABULARY)
        for count in (len(train) // BLOCK - 1, 10**6)
    )
    assert once == often, "whatever the epochs"
