"""Memory of decoding: the cache in exact bytes, and the peak with and without a cache."""

import gc
from collections.abc import Callable, Iterator, Sequence

import torch

from kvlab.benchmark.decode_timing import DecodeRun, time_uncached
from kvlab.benchmark.measurement import Measurement, Metrics, TableLayout, find_value
from kvlab.benchmark.peak_memory import measure_peak_memory
from kvlab.benchmark.session import Session
from kvlab.errors import MeasurementError
from kvlab.layout import KVLayout
from kvlab.model import GPT
from kvlab.spec import ServingConfig
from kvlab.spec.benchmark_config import BenchmarkConfig

TABLES = (
    TableLayout("KV bytes at batch 1 and the block size", {"context_length": "context"}, {
        "kv_formula": "formula", "kv_storage": "storages", "kv_requested": "asked of CUDA",
        "kv_allocated": "allocated", "kv_read": "read/token",
    }),
    TableLayout("peak at batch 1", {"context_length": "context", "cached": "cache"}, {
        "peak": "peak", "peak_weights": "weights", "peak_cache": "cache",
        "peak_logits": "logits", "peak_activations": "activations",
    }),
)  # fmt: skip

PEAK_RUNS = 2
"""Runs of each peak. The smallest counts: other activity of the process only adds to it."""

ALLOCATOR_BLOCK = 512
"""CUDA's caching allocator returns multiples of this many bytes."""

MAX_UNSPLIT_REST = 2**20
"""Smaller tensors get exactly their blocks. A larger one may keep a rest of up to this size."""


def measure(session: Session) -> Iterator[Measurement]:
    """Yield KV bytes at batch 1 and the block size, and peaks at the benchmark's lengths.

    Raises:
        MeasurementError: byte counts that must agree do not.
    """
    for variant in session.variants:
        block = variant.model.config.block_size
        for metric, count in count_kv_bytes(variant.model, variant.serving, 1, block).items():
            yield session.make_line(
                "memory", metric, variant, count, "bytes", batch_size=1, context_length=block,
                cached=True, exact=True,
            )  # fmt: skip
    prompt, new = session.settings.prompt_tokens, session.settings.new_tokens
    for variant in session.variants:
        model, serving = variant.model, variant.serving
        DecodeRun(model, model.new_cache(1, prompt + new, serving), new).time()  # loads libraries
        peaks = measure_peaks(model, serving, prompt, new, lambda: session.on_turn("peak"))
        for cached, peak in peaks.items():
            run = session.settings.run_fields(1) | {"cached": cached}
            for metric, count in peak.items():
                is_exact = metric not in ("peak", "peak_activations")
                yield session.make_line(
                    "memory", metric, variant, count, "bytes", exact=is_exact, **run
                )


def metrics(lines: Sequence[Measurement], _config: BenchmarkConfig) -> Metrics:
    """Return what a trial records of its lines."""
    return {
        "kv_bytes_formula": find_value(lines, "kv_formula"),
        "kv_bytes_storage": find_value(lines, "kv_storage"),
        "kv_bytes_read": find_value(lines, "kv_read"),
        "peak_bytes_cached": find_value(lines, "peak", cached=True),
        "peak_bytes_uncached": find_value(lines, "peak", cached=False),
        "peak_bytes_activations": find_value(lines, "peak_activations", cached=True),
    }


def count_kv_bytes(
    model: GPT, serving: ServingConfig, batch_size: int, length: int
) -> dict[str, int]:
    """Make a cache of ``length`` tokens per row and count its bytes.

    Returns:
        ``kv_formula``, ``kv_storage`` (unique storages), ``kv_read`` (to decode the last token),
        and on CUDA ``kv_requested`` of its allocator and ``kv_allocated`` (every tensor rounded up
        to its blocks).

    Raises:
        MeasurementError: formula, storages and, on CUDA, the allocator do not agree.
    """
    layout = KVLayout.of(model.config, serving)
    formula = layout.stored_bytes(batch_size, length, model.dtype_name)
    gc.collect()  # what it frees between the readings would count as the cache's
    before = _allocator_bytes(model.device)
    cache = model.new_cache(batch_size, length, serving)
    require_equal_bytes("KV bytes by unique storage", cache.nbytes, formula)
    read = layout.read_bytes(batch_size, length, model.dtype_name)
    counts = {"kv_formula": formula, "kv_storage": cache.nbytes, "kv_read": read}
    if model.device.type != "cuda":
        return counts
    after = _allocator_bytes(model.device)
    requested, allocated = (end - start for start, end in zip(before, after, strict=True))
    require_equal_bytes("KV bytes asked of the CUDA allocator", requested, formula)
    lowest, highest = allocated_range([tensor.nbytes for tensor in cache.tensors])
    if not lowest <= allocated <= highest:
        text = f"the CUDA allocator gave {allocated:,} bytes where whole blocks are {lowest:,}"
        raise MeasurementError(f"{text} to {highest:,}; one of them is wrong, so no result is kept")
    return {**counts, "kv_requested": requested, "kv_allocated": allocated}


def allocated_range(sizes: Sequence[int]) -> tuple[int, int]:
    """Return the least and the most that the CUDA allocator gives for tensors of these bytes.

    They are equal, whole blocks of 512 bytes each, if no tensor is above 1 MiB. A larger one may
    keep the rest of a free block if that is at most 1 MiB (`should_split` in PyTorch's
    `CUDACachingAllocator`).
    """
    least = sum(map(round_up_to_blocks, sizes))
    large = sum(round_up_to_blocks(size) > MAX_UNSPLIT_REST for size in sizes)
    return least, least + large * MAX_UNSPLIT_REST


def round_up_to_blocks(count: int) -> int:
    """Return bytes in whole blocks of the CUDA allocator."""
    return -(-count // ALLOCATOR_BLOCK) * ALLOCATOR_BLOCK


def require_equal_bytes(name: str, measured: int, formula: int) -> None:
    """Raise MeasurementError unless two exact byte counts are equal."""
    if measured != formula:
        text = f"{name} are {measured:,} and by formula {formula:,}"
        raise MeasurementError(f"{text}; one of them is wrong, so no result is kept")


def _allocator_bytes(device: torch.device) -> list[int]:
    """Return the bytes in use before and after the allocator's rounding; on CPU zeros."""
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return [stats.get(f"{kind}_bytes.all.current", 0) for kind in ("requested", "allocated")]


def measure_peaks(
    model: GPT, serving: ServingConfig, prompt: int, new: int, on_run: Callable[[], None]
) -> dict[bool, dict[str, int]]:
    """Measure the peak with a cache (True) and without (False) at batch 1.

    Run the decoder once before, so that all libraries are loaded.

    Args:
        prompt, new: tokens of the prompt, and after it.
        on_run: called after every run.

    Returns:
        The most bytes while decoding one sequence to its last token, in all and by what they hold.
        ``peak_activations`` is the rest: activations, the scratch memory of kernels, and what the
        allocator rounds up and keeps.
    """
    length = prompt + new
    works: dict[bool, Callable[[], object]] = {
        True: lambda: DecodeRun(model, model.new_cache(1, length, serving), new).time(),
        False: lambda: time_uncached(model, length),
    }
    stored = KVLayout.of(model.config, serving).stored_bytes(1, length, model.dtype_name)
    logits = model.config.vocab_size * model.dtype.itemsize
    peaks = {}
    for cached, work in works.items():
        growths = []
        for _ in range(PEAK_RUNS):
            growths.append(measure_peak_memory(model.device, work).growth)
            on_run()
        cache = stored if cached else 0
        parts = {
            "peak_weights": sum(parameter.nbytes for parameter in model.parameters()),
            "peak_cache": cache,
            "peak_logits": logits,
            "peak_activations": max(0, min(growths) - cache - logits),
        }
        peaks[cached] = {"peak": sum(parts.values()), **parts}
    return peaks
