"""The largest batch that fits, found by trying in separate processes.

A try has weights of its own, so this process takes its own off the device while it searches.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvlab.benchmark.max_batch_search import find_largest_batch
from kvlab.benchmark.measurement import Measurement
from kvlab.benchmark.memory_probe import DecodeAttempt
from kvlab.benchmark.session import Session, Variant
from kvlab.errors import UsageError
from kvlab.layout import KVLayout
from kvlab.model import GPT


def measure(session: Session) -> Iterator[Measurement]:
    """Beside what the formula has room for: weights and cache alone, nothing else.

    Raises:
        UsageError: ``memory`` is more than the device has.
    """
    device, memory = session.device, session.settings.memory
    if device.type != "cuda" and memory is None:
        session.say("limit is left out: on CPU it needs --memory, such as --memory 8GiB")
        return
    with move_off_device([variant.model for variant in session.variants]):
        room, given = _available_memory(device, memory)
        lines = [
            line
            for variant in session.variants
            for line in _max_batch_lines(session, variant, device, room, given)
        ]
    yield from lines


@contextmanager
def move_off_device(models: Sequence[GPT]) -> Iterator[None]:
    """Models on CUDA wait in main memory meanwhile, and the allocator keeps nothing."""
    devices = [model.device for model in models]
    for model in models:
        model.to("cpu")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        yield
    finally:
        for model, device in zip(models, devices, strict=True):
            model.to(device)


def sequences_that_fit(layout: KVLayout, room: int, weights: int, length: int, dtype: str) -> int:
    """Sequences of ``length`` tokens whose cache fits in ``room`` bytes beside the weights."""
    return max(0, layout.largest_batch(room - weights, length, dtype))


def _available_memory(device: torch.device, memory: int | None) -> tuple[int, str]:
    """Bytes that a try may use, and where the number is from."""
    if device.type != "cuda":
        assert memory is not None
        return memory, f"{memory:,} bytes given"
    free, total = torch.cuda.mem_get_info(device)
    if memory is None:
        return free, f"{free:,} bytes free on the device"
    if memory > total:
        raise UsageError(f"--memory {memory:,} is over the device's {total:,}; give less")
    if memory > free:
        return free, f"{free:,} bytes free on the device, below the {memory:,} given"
    return memory, f"{memory:,} bytes given"


def _max_batch_lines(
    session: Session, variant: Variant, device: torch.device, room: int, given: str
) -> Iterator[Measurement]:
    settings = session.settings
    length = settings.prompt_tokens + settings.new_tokens
    weights = sum(parameter.nbytes for parameter in variant.model.parameters())
    by_formula = sequences_that_fit(variant.layout, room, weights, length, variant.dtype)
    attempt = DecodeAttempt(
        variant.model.config,
        variant.serving,
        variant.dtype,
        device.type,
        settings.prompt_tokens,
        settings.new_tokens,
        settings.memory,
        torch.get_num_threads(),
    )

    def tick(batch: int, fitted: bool) -> None:
        session.on_tick(f"batch {batch} {'fits' if fitted else 'does not fit'}")

    found = find_largest_batch(attempt, by_formula, tick)
    session.largest[variant.name] = found
    place = {
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        "context_length": length,
        "cached": True,
    }
    yield session.line("limit", "largest_batch", variant, found, "sequences", note=given, **place)
    note = f"{given}, weights and cache alone"
    yield session.line(
        "limit", "largest_batch_formula", variant, by_formula, "sequences", exact=True, note=note,
        **place,
    )  # fmt: skip
