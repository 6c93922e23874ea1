"""The largest batch that fits, found by trying in separate processes."""

from collections.abc import Iterator

import torch

from kvlab.benchmark.attempt import DecodeAttempt
from kvlab.benchmark.limit import largest_batch
from kvlab.benchmark.measurement import Measurement
from kvlab.benchmark.session import Session, Variant


def measure(session: Session) -> Iterator[Measurement]:
    """Beside what the formula has room for: weights and cache alone, nothing else."""
    on_cuda = session.device.type == "cuda"
    memory = session.settings.memory
    if not on_cuda and memory is None:
        session.say("limit is left out: on CPU it needs --memory, such as --memory 8GiB")
        return
    for variant in session.variants:
        room = torch.cuda.mem_get_info(session.device)[0] if on_cuda else memory
        assert room is not None
        yield from _limit(session, variant, room, None if on_cuda else memory)


def _limit(
    session: Session, variant: Variant, room: int, memory: int | None
) -> Iterator[Measurement]:
    settings = session.settings
    length = settings.prompt_tokens + settings.new_tokens
    weights = sum(parameter.nbytes for parameter in variant.model.parameters())
    by_formula = max(0, variant.layout.largest_batch(room - weights, length, variant.dtype))
    attempt = DecodeAttempt(
        variant.model.config,
        variant.serving,
        variant.dtype,
        session.device.type,
        settings.prompt_tokens,
        settings.new_tokens,
        memory,
        torch.get_num_threads(),
    )

    def tick(batch: int, fitted: bool) -> None:
        session.on_tick(f"batch {batch} {'fits' if fitted else 'does not fit'}")

    found = largest_batch(attempt, by_formula, tick)
    place = {
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        "context_length": length,
        "cached": True,
    }
    given = f"{room:,} bytes {'given' if memory is not None else 'free on the device'}"
    line = session.line("limit", "largest_batch", variant, found, "sequences", note=given, **place)
    yield line
    note = f"{given}, weights and cache alone"
    yield session.line(
        "limit", "largest_batch_formula", variant, by_formula, "sequences", exact=True, note=note,
        **place,
    )  # fmt: skip
