"""Memory of decoding: the cache in exact bytes, and the peak with and without it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch

from kvlab.benchmark.decode_timing import TimedDecoder
from kvlab.benchmark.measurement import Measurement
from kvlab.benchmark.peak_memory import resident_growth
from kvlab.benchmark.session import Session, Variant
from kvlab.errors import MeasurementError
from kvlab.layout import KVLayout

PEAK_RUNS = 2
"""Runs of each peak. The least is taken: whatever else goes on in the process only adds."""

ALLOCATOR_BLOCK = 512
"""CUDA's caching allocator gives out multiples of this many bytes."""


MAX_UNSPLIT_REST = 2**20
"""Tensors up to this get exactly their blocks; a rest of up to this stays with a larger one."""


@dataclass(frozen=True)
class KVBytes:
    """Bytes of one cache, counted in several ways that agree.

    Attributes:
        stored: by formula, and by the unique storages of the cache.
        read: of K/V read to decode the last token.
        requested: asked of the CUDA allocator; None elsewhere.
        allocated: by which its allocated bytes rose: every tensor rounded up to its blocks.
    """

    stored: int
    read: int
    requested: int | None
    allocated: int | None


def count_kv_bytes(decoder: TimedDecoder, batch_size: int, length: int) -> KVBytes:
    """Makes a cache of ``length`` tokens a row and counts.

    Raises:
        MeasurementError: formula, storages and, on CUDA, the allocator do not agree.
    """
    model = decoder.model
    layout = KVLayout.of(model.config, decoder.serving)
    dtype = str(model.dtype).removeprefix("torch.")
    formula = layout.stored_bytes(batch_size, length, dtype)
    requested, allocated = _allocator_bytes(model.device)
    cache = decoder.new_cache(batch_size, length)
    require_equal_bytes("KV bytes by unique storage", cache.nbytes, formula)
    read = layout.read_bytes(batch_size, length, dtype)
    if requested is None or allocated is None:
        return KVBytes(formula, read, None, None)
    more_requested, more_allocated = _allocator_bytes(model.device)
    requested, allocated = (more_requested or 0) - requested, (more_allocated or 0) - allocated
    require_equal_bytes("KV bytes asked of the CUDA allocator", requested, formula)
    least, most = allocated_range([tensor.nbytes for tensor in cache.tensors])
    if not least <= allocated <= most:
        text = f"the CUDA allocator gave {allocated:,} bytes where whole blocks are {least:,}"
        raise MeasurementError(f"{text} to {most:,}; one of them is wrong, so no result is kept")
    return KVBytes(formula, read, requested, allocated)


def allocated_range(sizes: Sequence[int]) -> tuple[int, int]:
    """The least and the most that the CUDA allocator gives for tensors of these bytes.

    They are equal, whole blocks of 512 bytes each, where none is above 1 MiB. With a larger one
    may stay what is left of a free block, if that is 1 MiB at most (`should_split` in PyTorch's
    `CUDACachingAllocator`).
    """
    least = sum(map(round_up_to_blocks, sizes))
    return least, least + sum(
        MAX_UNSPLIT_REST for size in sizes if round_up_to_blocks(size) > MAX_UNSPLIT_REST
    )


def round_up_to_blocks(count: int) -> int:
    """Bytes in whole blocks of the CUDA allocator."""
    return -(-count // ALLOCATOR_BLOCK) * ALLOCATOR_BLOCK


def require_equal_bytes(name: str, measured: int, formula: int) -> None:
    """Raises MeasurementError unless two exact byte counts are equal."""
    if measured != formula:
        text = f"{name} are {measured:,} and by formula {formula:,}"
        raise MeasurementError(f"{text}; one of them is wrong, so no result is kept")


def _allocator_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Bytes asked of the allocator and not freed yet, before and after it rounds."""
    if device.type != "cuda":
        return None, None
    stats = torch.cuda.memory_stats(device)
    return stats.get("requested_bytes.all.current"), stats.get("allocated_bytes.all.current")


@dataclass(frozen=True)
class PeakMemory:
    """The most bytes of decoding one sequence to its last token, and what they are.

    ``activations`` is what remains: activations, the scratch memory of kernels, and what the
    allocator rounds and keeps.
    """

    weights: int
    cache: int
    logits: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.logits + self.activations


def measure_peaks(
    decoder: TimedDecoder, prompt_tokens: int, new_tokens: int, tick: Callable[[], None]
) -> dict[bool, PeakMemory]:
    """The peak with the cache (True) and without (False), at batch 1.

    On CUDA by the allocator, on CPU by the resident size of the process. Run the decoder once
    before, so that libraries are loaded.
    """
    length = prompt_tokens + new_tokens
    works: dict[bool, Callable[[], object]] = {
        True: lambda: decoder.decode(decoder.new_cache(1, length), new_tokens),
        False: lambda: decoder.decode_again(length),
    }
    return {
        cached: _measure_peak(decoder, cached, length, work, tick) for cached, work in works.items()
    }


def _measure_peak(
    decoder: TimedDecoder,
    cached: bool,
    length: int,
    work: Callable[[], object],
    tick: Callable[[], None],
) -> PeakMemory:
    model = decoder.model
    growths = []
    for _ in range(PEAK_RUNS):
        growths.append(_peak_growth(model.device, work))
        tick()
    dtype = str(model.dtype).removeprefix("torch.")
    layout = KVLayout.of(model.config, decoder.serving)
    cache = layout.stored_bytes(1, length, dtype) if cached else 0
    logits = model.config.vocab_size * model.dtype.itemsize
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return PeakMemory(weights, cache, logits, max(0, min(growths) - cache - logits))


def _peak_growth(device: torch.device, work: Callable[[], object]) -> int:
    if device.type != "cuda":
        return resident_growth(work)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


# Exact KV bytes, and the peak with and without a cache, split by what it holds.


def measure(session: Session) -> Iterator[Measurement]:
    """KV bytes at batch 1 and the block size; peaks at batch 1 and the benchmark's lengths.

    Raises:
        MeasurementError: byte counts that must agree do not.
    """
    for variant in session.variants:
        yield from _kv_lines(session, variant)
    for variant in session.variants:
        yield from _peak_lines(session, variant)


def _kv_lines(session: Session, variant: Variant) -> Iterator[Measurement]:
    block = variant.model.config.block_size
    found = count_kv_bytes(variant.decoder, 1, block)
    counts = {
        "kv_formula": found.stored,
        "kv_storage": found.stored,
        "kv_read": found.read,
        "kv_requested": found.requested,
        "kv_allocated": found.allocated,
    }
    line = partial(session.line, "memory", batch_size=1, context_length=block, cached=True)
    for metric, count in counts.items():
        if count is not None:
            yield line(metric=metric, variant=variant, value=count, unit="bytes", exact=True)


def _peak_lines(session: Session, variant: Variant) -> Iterator[Measurement]:
    prompt, new = session.settings.prompt_tokens, session.settings.new_tokens
    decoder = variant.decoder
    decoder.decode(decoder.new_cache(1, prompt + new), new)
    for cached, peak in measure_peaks(
        decoder, prompt, new, lambda: session.on_tick("peak")
    ).items():
        line = partial(
            session.line,
            "memory",
            variant=variant,
            unit="bytes",
            batch_size=1,
            prompt_tokens=prompt,
            new_tokens=new,
            context_length=prompt + new,
            cached=cached,
        )
        yield line(metric="peak", value=peak.total)
        for part in fields(PeakMemory):
            exact = part.name != "activations"
            yield line(metric=f"peak_{part.name}", value=getattr(peak, part.name), exact=exact)
