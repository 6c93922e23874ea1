"""Memory of decoding: the cache in exact bytes, and the peak with and without a cache."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from kvlab.benchmark.decode_timing import TimedDecoder
from kvlab.benchmark.measurement import Measurement, Metrics, TableLayout, find_value
from kvlab.benchmark.peak_memory import measure_peak_memory
from kvlab.benchmark.session import Session
from kvlab.errors import MeasurementError
from kvlab.layout import KVLayout
from kvlab.spec.benchmark_config import BenchmarkConfig

TABLES = (
    TableLayout("KV bytes at batch 1 and the block size", ("context_length",), {
        "kv_formula": "formula", "kv_storage": "storages", "kv_requested": "asked of CUDA",
        "kv_allocated": "allocated", "kv_read": "read/token",
    }),
    TableLayout("peak at batch 1", ("context_length", "cached"), {
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
        counted = count_kv_bytes(variant.decoder, 1, block)
        counts = {
            "kv_formula": counted.stored,
            "kv_storage": counted.stored,
            "kv_read": counted.read,
            "kv_requested": counted.requested,
            "kv_allocated": counted.allocated,
        }
        for metric, count in counts.items():
            if count is not None:
                yield session.make_line(
                    "memory", metric, variant, count, "bytes", batch_size=1, context_length=block,
                    cached=True, exact=True,
                )  # fmt: skip
    prompt, new = session.settings.prompt_tokens, session.settings.new_tokens
    for variant in session.variants:
        decoder = variant.decoder
        decoder.decode(decoder.new_cache(1, prompt + new), new)  # load all libraries
        peaks = measure_peaks(decoder, prompt, new, lambda: session.on_turn("peak"))
        for cached, peak in peaks.items():
            run = session.settings.run_fields(1) | {"cached": cached}
            for name in ("total", *(part.name for part in fields(PeakMemory))):
                metric, is_exact = f"peak_{name}", name not in ("total", "activations")
                yield session.make_line(
                    "memory", metric.removesuffix("_total"), variant, getattr(peak, name), "bytes",
                    exact=is_exact, **run,
                )  # fmt: skip


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


@dataclass(frozen=True)
class KVBytes:
    """Bytes of one cache, counted in several ways that agree.

    Attributes:
        stored: by formula, and by the unique storages of the cache.
        read: K/V read to decode the last token.
        requested: requested from the CUDA allocator; None elsewhere.
        allocated: growth of the allocator's bytes, every tensor rounded up to its blocks.
    """

    stored: int
    read: int
    requested: int | None
    allocated: int | None


def count_kv_bytes(decoder: TimedDecoder, batch_size: int, length: int) -> KVBytes:
    """Make a cache of ``length`` tokens per row and count its bytes.

    Raises:
        MeasurementError: formula, storages and, on CUDA, the allocator do not agree.
    """
    model = decoder.model
    layout = KVLayout.of(model.config, decoder.serving)
    formula = layout.stored_bytes(batch_size, length, model.dtype_name)
    gc.collect()  # what it frees between the readings would count as the cache's
    before = _allocator_bytes(model.device)
    cache = decoder.new_cache(batch_size, length)
    require_equal_bytes("KV bytes by unique storage", cache.nbytes, formula)
    read = layout.read_bytes(batch_size, length, model.dtype_name)
    after = _allocator_bytes(model.device)
    if before is None or after is None:
        return KVBytes(formula, read, None, None)
    requested, allocated = (end - start for start, end in zip(before, after, strict=True))
    require_equal_bytes("KV bytes asked of the CUDA allocator", requested, formula)
    lowest, highest = allocated_range([tensor.nbytes for tensor in cache.tensors])
    if not lowest <= allocated <= highest:
        text = f"the CUDA allocator gave {allocated:,} bytes where whole blocks are {lowest:,}"
        raise MeasurementError(f"{text} to {highest:,}; one of them is wrong, so no result is kept")
    return KVBytes(formula, read, requested, allocated)


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


def _allocator_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes in use before and after the allocator's rounding; None on CPU."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    return (
        stats.get("requested_bytes.all.current", 0),
        stats.get("allocated_bytes.all.current", 0),
    )


@dataclass(frozen=True)
class PeakMemory:
    """The most bytes while decoding one sequence to its last token, by what they hold.

    ``activations`` is the rest: activations, the scratch memory of kernels, and what the
    allocator rounds up and keeps.
    """

    weights: int
    cache: int
    logits: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.logits + self.activations


def measure_peaks(
    decoder: TimedDecoder, prompt_tokens: int, new_tokens: int, on_run: Callable[[], None]
) -> dict[bool, PeakMemory]:
    """Measure the peak with a cache (True) and without (False) at batch 1.

    Run the decoder once before, so that all libraries are loaded.

    Args:
        on_run: called after every run.
    """
    length = prompt_tokens + new_tokens
    works: dict[bool, Callable[[], object]] = {
        True: lambda: decoder.decode(decoder.new_cache(1, length), new_tokens),
        False: lambda: decoder.decode_uncached(length),
    }
    model = decoder.model
    stored = KVLayout.of(model.config, decoder.serving).stored_bytes(1, length, model.dtype_name)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    logits = model.config.vocab_size * model.dtype.itemsize
    peaks = {}
    for cached, work in works.items():
        growths = []
        for _ in range(PEAK_RUNS):
            growths.append(measure_peak_memory(model.device, work).growth)
            on_run()
        cache = stored if cached else 0
        rest = max(0, min(growths) - cache - logits)
        peaks[cached] = PeakMemory(weights, cache, logits, rest)
    return peaks
