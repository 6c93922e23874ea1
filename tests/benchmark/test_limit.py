"""The batch search: exact on a known budget, every try gone when it is over."""

import psutil
import pytest

from kvlab.benchmark import limit
from kvlab.benchmark.attempt import DecodeAttempt
from kvlab.benchmark.limit import largest_batch, run_apart
from kvlab.errors import MeasurementError
from kvlab.spec import ModelConfig, ServingConfig
from tests.benchmark.budget import Broken, Budget, Killed


@pytest.mark.parametrize("guess", [1, 37, 60])
def test_a_known_budget_is_found_exactly(guess):
    budget, before = Budget(40_000_000, 3_000_000, 1_000_000), psutil.Process().memory_info().rss
    tries = []
    found = largest_batch(budget, guess, lambda batch, fits: tries.append((batch, fits)))
    assert found == 37
    assert {(37, True), (38, False)} <= set(tries)
    assert psutil.Process().children(recursive=True) == []
    assert psutil.Process().memory_info().rss - before < 10_000_000


@pytest.mark.parametrize(("true", "guess"), [(0, 9), (1, 1), (1, 1000), (12_345, 3), (64, 65)])
def test_the_search_is_exact_from_any_guess(true, guess, monkeypatch):
    monkeypatch.setattr(limit, "run_apart", lambda _attempt, batch: batch <= true)
    assert largest_batch(Budget(0, 0, 0), guess, lambda _batch, _fits: None) == true


def test_a_try_that_fails_otherwise_is_no_limit():
    with pytest.raises(MeasurementError, match="ValueError: no such thing as 3"):
        run_apart(Broken(), 3)


def test_a_try_that_the_system_kills_did_not_fit():
    assert run_apart(Killed(), 1) is False


def test_a_real_decode_obeys_its_limit():
    """A cache of 16 MiB a sequence, and 64 MiB: three at most, and room for one."""
    shape = {"vocab_size": 64, "block_size": 2048, "n_layer": 4, "n_head": 4, "n_embd": 256}
    model = ModelConfig(**shape)
    attempt = DecodeAttempt(model, ServingConfig(), "float32", "cpu", 8, 2040, 2**26, 1)
    assert run_apart(attempt, 1) is True
    assert run_apart(attempt, 4) is False
