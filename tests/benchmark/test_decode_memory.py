import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlab.benchmark import peak_memory
from kvlab.benchmark.decode_timing import DecodeRun
from kvlab.benchmark.measures import decode_memory
from kvlab.benchmark.measures.decode_memory import allocated_range, count_kv_bytes, measure_peaks
from kvlab.benchmark.peak_memory import measure_peak_memory
from kvlab.errors import MeasurementError
from kvlab.model import GPT
from kvlab.model.kernels import malloc
from kvlab.spec import ModelConfig, ServingConfig

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
        ({}, {"kv_dtype": "int4", "kv_group": 4}, 6 * 32 * 2 * 4 * 8, 6 * 32 * 2 * 4 * 8),
    ],
)
def test_kv_bytes_are_those_counted_by_hand(shape, serving, stored, read):
    model = GPT(ModelConfig(**{**SHAPE, **shape}))
    counted = count_kv_bytes(model, ServingConfig(**serving), 1, 32)
    assert counted == {"kv_formula": stored, "kv_storage": stored, "kv_read": read}


def test_a_cache_that_holds_more_than_the_formula_says_is_a_bug():
    class Spacious(GPT):
        def new_cache(self, batch_size, max_length, serving=None):
            return super().new_cache(batch_size, max_length + 1, serving)

    with pytest.raises(MeasurementError, match=r"are 50,688 and by formula 49,152"):
        count_kv_bytes(Spacious(ModelConfig(**SHAPE)), ServingConfig(), 1, 32)


def growth(work):
    return measure_peak_memory(torch.device("cpu"), work).growth


def touch(size):
    """Takes and frees ``size`` bytes."""
    np.ones(size, dtype=np.uint8)


sees_peaks = pytest.mark.skipif(
    not malloc.reset_resident_peak(), reason="sampled sizes, as on macOS, include what malloc keeps"
)


@pytest.fixture(scope="module")
def process():
    """A process of its own: threads of other tests that have ended leave heaps with holes, which
    the thread that is measured may get."""
    context, one = multiprocessing.get_context("spawn"), torch.set_num_threads
    with ProcessPoolExecutor(1, context, initializer=one, initargs=(1,)) as pool:
        yield pool


def grow_by_a_block(kernel_counts):
    def work():
        block = np.ones(40_000_000, dtype=np.uint8)
        time.sleep(0.02)
        return block[0]

    with pytest.MonkeyPatch.context() as patch:
        if not kernel_counts:
            patch.setattr(malloc, "_RESET", Path("/no/such/file"))
        touch(60_000_000)  # what is kept of this must not be used unseen
        return growth(work), growth(lambda: None)


@pytest.mark.parametrize("kernel_counts", [True, False])
def test_growth_sees_memory_that_is_gone_again(kernel_counts, process):
    block, none = process.submit(grow_by_a_block, kernel_counts).result()
    assert 39_500_000 <= block < 45_000_000, "the kernel counts to about 0.2 MB"
    assert none < 1_000_000


def grow_again():
    pieces = [bytearray(20_000) for _ in range(5000)]
    del pieces
    return growth(lambda: [bytearray(b"x" * 20_000) for _ in range(5000)])


def test_small_pieces_that_were_freed_before_are_counted_again(process):
    assert 98_000_000 <= process.submit(grow_again).result() < 105_000_000


class FakeMatrix:
    def __matmul__(self, _other):
        """What it allocates is in `FakeAllocator.use_stream`."""


class FakeAllocator:
    """Bytes that are allocated on a device; cuBLAS keeps 32 for each stream that it has seen."""

    def __init__(self, monkeypatch):
        self.now = self.peak = 0
        self.streams, self.stream = set(), "default"
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)
        monkeypatch.setattr(peak_memory, "capture_stream", lambda _device: "capture")
        monkeypatch.setattr(torch, "ones", lambda *_a, **_k: FakeMatrix())
        for name, fake in {
            "current_stream": lambda _device: "default", "stream": self.use_stream,
            "synchronize": lambda _device: None, "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda _device: setattr(self, "peak", self.now),
            **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda _device: self.now),
            **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda _d: self.peak),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, fake)

    @contextmanager
    def use_stream(self, stream):
        self.stream = stream
        self.multiply()
        yield

    def add(self, count):
        self.now += count
        self.peak = max(self.peak, self.now)

    def multiply(self):
        if self.stream not in self.streams:
            self.streams.add(self.stream)
            self.add(32)

    def clear(self):
        self.now -= 32 * len(self.streams)
        self.streams = set()


@pytest.mark.parametrize("seen", [(), ("default",), ("default", "capture", "of another trial")])
def test_workspaces_of_cublas_are_no_activations(seen, monkeypatch):
    """Whatever ran before; but a process that is given memory needs them, too."""
    cuda = FakeAllocator(monkeypatch)
    for cuda.stream in seen:
        cuda.multiply()

    def work():
        for cuda.stream in ("default", "capture"):
            cuda.multiply()
            cuda.add(5)
            cuda.add(-5)

    device = torch.device("cuda")
    assert measure_peak_memory(device, work).growth == 5
    assert measure_peak_memory(device, work, reserved=True).growth == 64 + 5


@sees_peaks
def test_peaks_differ_by_the_caches(monkeypatch):
    """16 MB of cache with four heads, 4 MB with one; all else is nearly the same."""
    monkeypatch.setattr(decode_memory, "PEAK_RUNS", 1)
    peaks = []
    for heads in (4, 1):
        shape = {**SHAPE, "block_size": 256, "n_layer": 8, "head_dim": 256, "n_kv_head": heads}
        model = GPT(ModelConfig(**shape))
        DecodeRun(model, model.new_cache(1, 256), 192).time()
        peaks.append(measure_peaks(model, ServingConfig(), 64, 192, lambda: None))
        weights = sum(p.nbytes for p in model.parameters())
        cached, uncached = peaks[-1][True], peaks[-1][False]
        assert cached["peak_weights"] == uncached["peak_weights"] == weights
        caches = cached["peak_cache"], uncached["peak_cache"]
        assert caches == (8 * 256 * 2 * 256 * heads * 4, 0)
        assert cached["peak_logits"] == 64 * 4
        assert uncached["peak_activations"] > 0
    saved = peaks[0][True]["peak"] - peaks[1][True]["peak"]
    kv = 8 * 256 * 2 * 256 * 4 * 3
    fewer_weights = 8 * 2 * 3 * 256 * (32 + 1) * 4
    assert saved == pytest.approx(kv + fewer_weights, rel=0.1)


WIDE = {"vocab_size": 64, "block_size": 512, "n_head": 4, "n_embd": 256}
STREAM = 512 * 256 * 4
"""Bytes of one residual stream of `WIDE`; the product of qkv has three times as many."""


@pytest.fixture
def one_shot_growth(process):
    return lambda documents=None, **shape: process.submit(grow_one_shot, documents, shape).result()


def grow_one_shot(documents, shape):
    model = GPT(ModelConfig(**{**WIDE, **shape})).eval()
    tokens = torch.arange(512)[None] % 64

    @torch.inference_mode()
    def work():
        model.hidden_states(tokens, document_start=documents)

    work()
    return growth(work)


@sees_peaks
def test_a_one_shot_pass_holds_the_keys_and_values_of_one_layer_at_a_time(one_shot_growth):
    """Beside the stream x: norm(x), the MLP's four times wider product, its gelu, and its output.

    Were the products of qkv kept to the end, twelve layers would hold 36 streams more.
    """
    for layers in (2, 12):
        assert one_shot_growth(n_layer=layers) < (11 + 4) * STREAM
    assert one_shot_growth(n_layer=12, documents=3) < (11 + 4) * STREAM


@sees_peaks
def test_shared_keys_and_values_live_until_their_last_reader_and_without_the_queries(
    one_shot_growth,
):
    """Four owners with two readers each, all read once more at the end of the depth."""
    owners = [[i, i + 4] for i in range(4)]
    kept = 4 * 2 * STREAM
    grown = one_shot_growth(n_layer=8, kv_sharing=owners)
    assert (11 + 6) * STREAM < grown < 11 * STREAM + kept + 2 * STREAM
    assert one_shot_growth(n_layer=8, kv_sharing=[[0, 1], [2, 3], [4, 5], [6, 7]]) < 15 * STREAM


@pytest.mark.parametrize(
    ("sizes", "least", "most"),
    [
        ([0, 1, 512, 513], 512 + 512 + 1024, 512 + 512 + 1024),
        ([2**20], 2**20, 2**20),
        ([2**20 + 1, 100], 2**20 + 512 + 512, 2 * 2**20 + 512 + 512),
    ],
)
def test_small_tensors_have_exactly_their_blocks(sizes, least, most):
    assert allocated_range(sizes) == (least, most)
