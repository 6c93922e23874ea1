"""Batches are a pure function of (seed, step), cover the text, and shift by one token."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvlab.data.batches import (
    get_training_batch,
    spread_documents,
    spread_indices,
    spread_windows,
    take_documents,
    window_starts,
)
from kvlab.data.bigram_table import score_tables
from kvlab.data.tokenizers import load_tokenizer
from kvlab.errors import DataError
from tests.support.text_files import stories

TOKENS = np.arange(10_000, dtype=np.uint16)
SHAPE = {"batch_size": 8, "block_size": 32}


def test_a_batch_is_the_same_on_every_machine_and_version():
    # Recorded once: a change here means that old and new trainings see different text.
    x, y = get_training_batch(TOKENS, seed=1, step=2, batch_size=4, block_size=32)
    assert x[:, 0].tolist() == [2186, 3850, 7754, 394]
    assert x.shape == y.shape == (4, 32)
    assert x.dtype == y.dtype == np.int64
    assert (y == x + 1).all()  # the tokens are their own places
    assert (np.diff(x, axis=1) == 1).all()


def test_the_order_depends_neither_on_earlier_calls_nor_on_the_batch_size():
    small = {
        step: get_training_batch(TOKENS, seed=5, step=step, batch_size=3, block_size=32)[0]
        for step in reversed(range(8))
    }
    large, _ = get_training_batch(TOKENS, seed=5, step=0, batch_size=24, block_size=32)
    assert np.array_equal(np.concatenate([small[step] for step in range(8)]), large)


@given(
    tokens=st.integers(2, 3000),
    block_size=st.integers(1, 40),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 2**40),
)
def test_an_epoch_reads_every_window_once(tokens, block_size, seed, epoch):
    assume(tokens > block_size)
    size = max(1, tokens // block_size - 1)
    numbers = np.arange(epoch * size, (epoch + 1) * size)
    starts = np.sort(window_starts(numbers, tokens=tokens, block_size=block_size, seed=seed))
    assert (np.diff(starts) == block_size).all(), "side by side: nothing twice, no gap"
    assert 0 <= starts[0] < block_size
    assert starts[-1] + block_size < tokens, "the last target is there"


def test_seeds_and_epochs_have_different_orders_and_offsets():
    text = {"tokens": 1000 * 8, "block_size": 8}
    orders = [
        window_starts(np.arange(e * 999, e * 999 + 999), seed=s, **text)
        for s in range(4)
        for e in range(4)
    ]
    assert len({tuple(order // 8) for order in orders}) == 16
    cuts = [int(window_starts(np.array([e * 999]), seed=0, **text)[0]) % 8 for e in range(400)]
    assert np.bincount(cuts, minlength=8).min() > 25  # of 50


def test_the_shortest_text_has_one_window():
    x, y = get_training_batch(TOKENS[:33], seed=0, step=0, **SHAPE)
    assert (x == np.arange(32)).all()
    assert (y == np.arange(1, 33)).all()
    with pytest.raises(DataError, match="too few"):
        get_training_batch(TOKENS[:32], seed=0, step=0, **SHAPE)


def test_scored_windows_are_whole_and_evenly_spaced():
    text = spread_windows(TOKENS, 300, 32)  # rounded up to 320
    gaps = np.diff(text.starts) // 32
    assert len(text) == 10
    assert text.target_count == 320
    assert (text.starts % 32 == 0).all()
    assert gaps.max() - gaps.min() <= 1
    assert gaps.min() * 32 * 10 > len(TOKENS) * 0.8
    batches = list(text.iter_batches(4))
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    starts = np.concatenate([x[:, 0] for x, _ in batches])
    assert (starts == TOKENS[text.starts]).all()
    assert all((y == x + 1).all() for x, y in batches)
    assert (text.targets() == np.concatenate([y.ravel() for _, y in batches])).all()
    assert set(text.select(spread_indices(7, len(text))).starts) < set(text.starts)
    assert (spread_indices(20, 20) == np.arange(20)).all()


def test_a_whole_text_is_scored_once_and_one_token_less_is_refused():
    text = spread_windows(TOKENS[: 32 * 9 + 1], 32 * 9, 32)
    assert (text.targets() == TOKENS[1 : 32 * 9 + 1]).all()
    with pytest.raises(DataError, match="validation_fraction"):
        spread_windows(TOKENS[: 32 * 9], 32 * 9, 32)


def scored_texts(name, texts, target_bytes, block_size):
    """Return the scored text of each scored document."""
    tokenizer = load_tokenizer(name)
    end, token_bytes = tokenizer.end_of_text, tokenizer.token_bytes()
    tokens = np.array([token for text in texts for token in [end, *tokenizer.encode(text)]])
    text = spread_documents(tokens, target_bytes, block_size, tokenizer)
    found = {}
    for document, token in zip(text.find_documents([end]).tolist(), text.targets(), strict=True):
        found.setdefault(document, []).append(token)
    decoded = {
        document: tokenizer.decode([t for t in ids if t != end]) for document, ids in found.items()
    }
    assert sum(map(len, found.values())) == text.target_count
    size = sum(len(part.encode()) for part in decoded.values())
    assert token_bytes[text.targets()].sum() == size
    return decoded


@pytest.mark.parametrize("target_bytes", [700, 5000])
def test_every_tokenizer_and_block_size_scores_the_same_documents(target_bytes):
    texts = stories(60)
    expected = scored_texts("bytes", texts, target_bytes, 32)
    assert all(texts[document] == text for document, text in expected.items())
    size = sum(len(text.encode()) for text in expected.values())
    longest = max(len(text.encode()) for text in texts)
    assert target_bytes <= size < target_bytes + longest
    for name, block_size in (("bytes", 100), ("gpt2:300", 32), ("gpt2:2048", 7), ("gpt2", 64)):
        assert scored_texts(name, texts, target_bytes, block_size) == expected
    chosen = sorted(expected)
    largest_gap = max(np.diff([0, *chosen, 59]))
    assert largest_gap <= 4 * 60 / len(chosen), "spread over the text"


@given(st.lists(st.integers(1, 9), min_size=2, max_size=40), st.integers(2, 9), st.data())
def test_parts_of_a_text_are_its_documents_each_once(lengths, parts, data):
    text = np.concatenate([[7, *range(100, 99 + length)] for length in lengths])
    if len(lengths) < parts:
        with pytest.raises(DataError, match="fewer than evaluation.text_parts"):
            take_documents(text, 0, parts, 7)
        return
    own = [take_documents(text, part, parts, 7) for part in range(parts)]
    assert np.array_equal(np.concatenate(own), text)
    assert all(one[0] == 7 for one in own)
    longest = max(lengths)
    part = data.draw(st.integers(0, parts - 1))
    if longest * parts < len(text):  # else a document is longer than a part
        assert abs(len(own[part]) - len(text) / parts) <= longest


def test_a_seed_without_a_part_is_refused():
    with pytest.raises(DataError, match="no part 2 of evaluation.text_parts = 2; use seeds 0 to 1"):
        take_documents(np.array([7, 1, 7, 2]), 2, 2, 7)


def test_more_bytes_than_there_are_or_than_a_window_are_refused():
    with pytest.raises(DataError, match=r"evaluation\.loss_bytes = 1,000,000"):
        scored_texts("bytes", stories(10), 1_000_000, 32)
    with pytest.raises(DataError, match=r"less than one window of model\.block_size = 8,192"):
        scored_texts("bytes", stories(10), 100, 8192)


# Unigram and bigram tables, against counts in dictionaries

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
