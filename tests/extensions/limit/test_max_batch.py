"""The batch search: exact on a known budget, every try gone when it is over."""

import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from kvlab.benchmark.measurement import StopRule
from kvlab.benchmark.session import BenchmarkSettings, Session, Variant
from kvlab.errors import MeasurementError
from kvlab.extensions.limit import max_batch_search
from kvlab.extensions.limit.max_batch_search import find_largest_batch, fits_in_new_process
from kvlab.extensions.limit.measure import (
    DecodeAttempt,
    limit_cuda_memory,
    limit_private_memory,
    measure,
)
from kvlab.model import GPT
from kvlab.model.kernels import malloc
from kvlab.spec import ModelConfig, ServingConfig
from tests.contracts.measure_contract import check_measure
from tests.extensions.limit.attempts import Budget, Failing, Littered

TINY = {"vocab_size": 64, "block_size": 32, "n_layer": 3, "n_head": 4, "n_embd": 32}
WIDE = {"vocab_size": 64, "block_size": 2048, "n_layer": 4, "n_head": 4, "n_embd": 256}


def test_a_known_budget_is_found_exactly():
    budget, before = Budget(40_000_000, 3_000_000, 1_000_000), psutil.Process().memory_info().rss
    children = set(psutil.Process().children(recursive=True))
    tries = []
    largest = find_largest_batch(budget, 36, lambda batch, fits: tries.append((batch, fits)))
    assert largest == 37
    assert {(37, True), (38, False)} <= set(tries)
    assert set(psutil.Process().children(recursive=True)) <= children, "no attempt is left"
    assert psutil.Process().memory_info().rss - before < 10_000_000


@pytest.mark.parametrize(
    ("true", "guess"),
    [(0, 9), (1, 1), (1, 1000), (12_345, 3), (64, 65), (953, 1000), (11_000, 10_000)],
)
def test_the_search_ends_within_a_percent_from_any_guess(true, guess, monkeypatch):
    monkeypatch.setattr(
        max_batch_search, "fits_in_new_process", lambda _attempt, batch: batch <= true
    )
    tries = []
    found = find_largest_batch(Budget(0, 0, 0), guess, lambda *one: tries.append(one))
    assert true - true // 100 <= found <= true
    assert len(tries) <= 7 or guess < true // 8 or true < guess // 8 or true < 200


def test_only_a_failure_for_want_of_memory_is_a_limit():
    """The system kills; a library crashes, and does not without the limit."""
    assert fits_in_new_process(Failing(1, signal=9), 1) is False
    assert fits_in_new_process(Failing(6, signal=11, heals=True), 6) is False
    with pytest.raises(MeasurementError, match="batch 1 could not be tried: exit code -11"):
        fits_in_new_process(Failing(1, signal=11), 1)
    with pytest.raises(MeasurementError, match="ValueError: no such thing as 3"):
        fits_in_new_process(Failing(1, signal=None), 3)


on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits it")


def test_a_system_that_limits_no_memory_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(malloc, "_STATUS", tmp_path / "status")
    with pytest.raises(OSError, match="VmData"):
        limit_private_memory(1)


@on_linux
def test_memory_that_the_process_freed_before_is_no_room():
    """40 MB lie free in the process, and 4 MB may come to them."""
    assert fits_in_new_process(Littered(40_000_000, 4_000_000), 5_000_000) is False


@on_linux
@pytest.mark.faults
def test_a_real_decode_obeys_its_limit():
    """A cache of 16 MiB a sequence, and 64 MiB: three at most, and room for one."""
    attempt = DecodeAttempt(
        ModelConfig(**WIDE), ServingConfig(), "float32", "cpu", 8, 2040, 2**26, 1
    )
    assert fits_in_new_process(attempt, 1) is True
    assert fits_in_new_process(attempt, 4) is False


def test_on_cuda_memory_counts_from_what_is_reserved_already(monkeypatch):
    facts, limits = SimpleNamespace(total_memory=1000), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: facts)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 50)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    for memory in (200, 990):
        limit_cuda_memory(memory)
    assert limits == [0.25, 1.0]


@pytest.mark.parametrize(("rest", "room"), [(80_000, 3), (4 * 24_576, 4), (-1, 0)])
def test_room_is_what_the_weights_leave(rest, room, monkeypatch):
    """A cache of 32 tokens takes 24,576 bytes."""
    monkeypatch.setattr(max_batch_search, "fits_in_new_process", lambda _, batch: batch <= 2)
    weights = sum(parameter.nbytes for parameter in GPT(ModelConfig(**TINY)).parameters())
    lengths = {"prompt_tokens": 8, "new_tokens": 24, "contexts": (8,), "batches": (1,)}
    variants = [
        Variant(name, GPT(ModelConfig(**TINY)), ServingConfig()) for name in ("one", "other")
    ]
    settings = BenchmarkSettings(**lengths, options={"limit": weights + rest}, stop_rule=StopRule())
    made = Session(variants, settings)
    found = {line.metric: line for line in measure(made) if line.variant == "one"}
    assert found["largest_batch_formula"].value == room
    assert found["largest_batch"].value == 2
    assert found["largest_batch"].note == f"{weights + rest:,} bytes given"


def test_the_measure_keeps_the_contract(monkeypatch):
    # instead of processes that try: the tests above have those
    monkeypatch.setattr(max_batch_search, "fits_in_new_process", lambda _, batch: batch <= 3)
    check_measure("limit", options={"limit": 1_000_000})
    check_measure("limit", is_available=False)
