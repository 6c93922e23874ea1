"""Batches are a pure function of (seed, step), cover the text, and shift by one token."""

import numpy as np
import pytest

from kvlab.data import training_batch, validation_batches
from kvlab.errors import DataError

TOKENS = np.arange(10_000, dtype=np.uint16)
SHAPE = {"batch_size": 8, "block_size": 32}


def test_y_is_x_one_token_later():
    x, y = training_batch(TOKENS, seed=0, step=0, **SHAPE)
    assert x.shape == y.shape == (8, 32)
    assert x.dtype == y.dtype == np.int64
    assert (y == x + 1).all()  # the tokens are their own places
    assert (np.diff(x, axis=1) == 1).all()


def test_a_batch_does_not_depend_on_what_was_asked_before():
    forward = [training_batch(TOKENS, seed=3, step=step, **SHAPE)[0] for step in range(6)]
    backward = [training_batch(TOKENS, seed=3, step=step, **SHAPE)[0] for step in range(5, -1, -1)]
    assert np.array_equal(forward, backward[::-1])


def test_a_batch_is_the_same_on_every_machine_and_version():
    # Recorded once: a change here means that old and new trainings see different text.
    x, _ = training_batch(TOKENS, seed=1, step=2, batch_size=4, block_size=32)
    assert x[:, 0].tolist() == [9947, 6762, 3355, 7450]


def test_seeds_and_steps_give_different_windows():
    starts = {
        tuple(training_batch(TOKENS, seed=seed, step=step, **SHAPE)[0][:, 0].tolist())
        for seed in range(10)
        for step in range(10)
    }
    assert len(starts) == 100


def test_smaller_batches_are_the_beginning_of_larger_ones():
    small, _ = training_batch(TOKENS, seed=5, step=7, batch_size=3, block_size=32)
    large, _ = training_batch(TOKENS, seed=5, step=7, batch_size=8, block_size=32)
    assert np.array_equal(large[:3], small)


def test_windows_start_everywhere_alike():
    tokens = np.arange(16 + 8, dtype=np.uint32)  # 16 places for windows of 8
    starts = np.concatenate(
        [training_batch(tokens, seed=0, step=s, batch_size=64, block_size=8)[0][:, 0]
         for s in range(100)]
    )  # fmt: skip
    counts = np.bincount(starts, minlength=16)
    assert len(counts) == 16
    chi_squared = ((counts - 400) ** 2 / 400).sum()
    assert chi_squared < 37.7  # 15 degrees of freedom, p = 0.001


def test_the_shortest_text_has_one_window():
    x, y = training_batch(TOKENS[:33], seed=0, step=0, **SHAPE)
    assert (x == np.arange(32)).all()
    assert (y == np.arange(1, 33)).all()
    with pytest.raises(DataError, match="too few"):
        training_batch(TOKENS[:32], seed=0, step=0, **SHAPE)


def test_validation_predicts_every_token_once():
    batches = list(validation_batches(TOKENS, tokens_wanted=320, block_size=32, batch_size=4))
    assert [x.shape for x, _ in batches] == [(4, 32), (4, 32), (2, 32)]
    targets = np.concatenate([y.ravel() for _, y in batches])
    assert targets.tolist() == list(range(1, 321))
    assert all((y == x + 1).all() for x, y in batches)


def test_validation_rounds_up_to_whole_windows():
    batches = list(validation_batches(TOKENS, tokens_wanted=33, block_size=32, batch_size=4))
    assert sum(x.size for x, _ in batches) == 64


def test_validation_wants_enough_tokens():
    assert len(list(validation_batches(TOKENS[:65], tokens_wanted=64, block_size=32, batch_size=1)))
    with pytest.raises(DataError, match="validation_fraction"):
        validation_batches(TOKENS[:64], tokens_wanted=64, block_size=32, batch_size=1)
