import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlab.benchmark import resident
from kvlab.benchmark.decode import Decoder
from kvlab.benchmark.memory import kv_measurements, peak_measurements
from kvlab.benchmark.resident import resident_growth
from kvlab.errors import MeasurementError
from kvlab.model import GPT
from kvlab.spec import BenchmarkConfig, ModelConfig, ServingConfig

SHAPE = {"vocab_size": 64, "block_size": 32, "n_layer": 6, "n_head": 4, "n_embd": 32}


@pytest.mark.parametrize(
    ("shape", "serving", "stored", "read"),
    [
        ({}, {}, 6 * 32 * 2 * 32 * 4, 6 * 32 * 2 * 32 * 4),
        ({"n_kv_head": 1}, {}, 6 * 32 * 2 * 8 * 4, 6 * 32 * 2 * 8 * 4),
        (
            {"attention_pattern": "GLLLLL", "window": 10},
            {"tie": "character-ai"},  # slots: layers 0, 1 to 3, 4 to 5
            (32 + 2 * 10) * 2 * 32 * 4,
            (32 + 5 * 10) * 2 * 32 * 4,
        ),
        ({}, {"kv_dtype": "int8"}, 6 * 32 * 2 * 4 * (8 + 2), 6 * 32 * 2 * 4 * (8 + 2)),
    ],
)
def test_kv_bytes_are_those_counted_by_hand(shape, serving, stored, read):
    model = GPT(ModelConfig(**{**SHAPE, **shape}))
    assert kv_measurements(model, ServingConfig(**serving)) == {
        "kv_bytes_formula": stored,
        "kv_bytes_storage": stored,
        "kv_bytes_read": read,
    }


def test_a_cache_that_holds_more_than_the_formula_says_is_a_bug():
    class Spacious(GPT):
        def new_cache(self, batch_size, max_length, serving=None, dtype=None):
            return super().new_cache(batch_size, max_length + 1, serving, dtype)

    with pytest.raises(MeasurementError, match=r"are 50,688 and by formula 49,152"):
        kv_measurements(Spacious(ModelConfig(**SHAPE)), ServingConfig())


def touch(size):
    """Takes and frees ``size`` bytes."""
    np.ones(size, dtype=np.uint8)


@pytest.mark.parametrize("kernel_counts", [True, False])
def test_growth_sees_memory_that_is_gone_again(kernel_counts, monkeypatch):
    if not kernel_counts:
        monkeypatch.setattr(resident, "_RESET", Path("/no/such/file"))
    touch(60_000_000)  # what is kept of this must not be used unseen

    def work():
        kept = np.ones(40_000_000, dtype=np.uint8)
        time.sleep(0.02)
        return kept[0]

    assert 39_500_000 <= resident_growth(work) < 45_000_000, "the kernel counts to about 0.2 MB"
    assert resident_growth(lambda: None) < 1_000_000


def test_small_pieces_that_were_freed_before_are_counted_again():
    pieces = [bytearray(20_000) for _ in range(1000)]
    del pieces
    growth = resident_growth(lambda: [bytearray(b"x" * 20_000) for _ in range(1000)])
    assert 19_500_000 <= growth < 25_000_000


def test_peaks_differ_by_the_caches():
    """16 MB of cache with four heads, 4 MB with one; all else is nearly the same."""
    peaks = []
    for heads in (4, 1):
        shape = {**SHAPE, "block_size": 256, "n_layer": 8, "head_dim": 256, "n_kv_head": heads}
        model = GPT(ModelConfig(**shape))
        lengths = BenchmarkConfig(prompt_tokens=16, new_tokens=240)
        decoder = Decoder(model, ServingConfig(), lengths)
        decoder.decode(1, decoder.new_cache(1))
        peaks.append(peak_measurements(decoder, lambda: None))
        weights = sum(p.nbytes for p in model.parameters())
        assert peaks[-1]["peak_bytes_uncached"] > weights
    saved = peaks[0]["peak_bytes_cached"] - peaks[1]["peak_bytes_cached"]
    kv = 8 * 256 * 2 * 256 * 4 * 3
    fewer_weights = 8 * 2 * 3 * 256 * (32 + 1) * 4
    assert saved == pytest.approx(kv + fewer_weights, rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_cuda_the_allocator_agrees_too():
    model = GPT(ModelConfig(**SHAPE)).to("cuda")
    found = kv_measurements(model, ServingConfig(kv_dtype="int8"))
    assert found["kv_bytes_formula"] == found["kv_bytes_storage"] == 6 * 32 * 2 * 4 * 10
    decoder = Decoder(model, ServingConfig(), BenchmarkConfig(prompt_tokens=8, new_tokens=8))
    peaks = peak_measurements(decoder, lambda: None)
    cache = decoder.new_cache(1).nbytes
    assert peaks["peak_bytes_cached"] >= sum(p.nbytes for p in model.parameters()) + cache
