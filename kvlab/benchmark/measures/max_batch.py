"""The largest batch that fits, found by trying in separate processes.

An attempt has weights of its own, so this process moves its weights off the device during the
search.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvlab.benchmark.max_batch_search import find_largest_batch
from kvlab.benchmark.measurement import Measurement, TableLayout
from kvlab.benchmark.memory_probe import DecodeAttempt
from kvlab.benchmark.session import Session, Variant
from kvlab.errors import UsageError
from kvlab.model import GPT

TABLES = (
    TableLayout("largest batch", ("context_length",), {
        "largest_batch": "tried", "largest_batch_formula": "room beside weights",
    }),
)  # fmt: skip


def measure(session: Session) -> Iterator[Measurement]:
    """Yield the largest batch by trying, and by the bytes of weights and cache alone.

    Raises:
        UsageError: ``memory`` is more than the device has.
    """
    device, memory = session.device, session.settings.memory
    if device.type != "cuda" and memory is None:
        session.on_notice("limit is left out: on CPU it needs --limit, such as --limit 8GiB")
        return
    lines: list[Measurement] = []
    with move_off_device([variant.model for variant in session.variants]):
        available, source = _available_memory(device, memory)
        for variant in session.variants:
            lines += _max_batch_lines(session, variant, device, available, source)
    yield from lines


@contextmanager
def move_off_device(models: Sequence[GPT]) -> Iterator[None]:
    """Move models from CUDA to main memory for a while, and empty the allocator's cache."""
    devices = [model.device for model in models]
    for model in models:
        model.to("cpu")
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # which the allocator would keep for each stream
        torch.cuda.empty_cache()
    try:
        yield
    finally:
        for model, device in zip(models, devices, strict=True):
            model.to(device)


def _available_memory(device: torch.device, memory: int | None) -> tuple[int, str]:
    """Return the bytes that an attempt may use, and where the number comes from."""
    if device.type != "cuda":
        assert memory is not None
        return memory, f"{memory:,} bytes given"
    free, total = torch.cuda.mem_get_info(device)
    if memory is None:
        return free, f"{free:,} bytes free on the device"
    if memory > total:
        raise UsageError(f"--limit {memory:,} is over the device's {total:,}; give less")
    if memory > free:
        return free, f"{free:,} bytes free on the device, below the {memory:,} given"
    return memory, f"{memory:,} bytes given"


def _max_batch_lines(
    session: Session, variant: Variant, device: torch.device, available: int, source: str
) -> Iterator[Measurement]:
    settings = session.settings
    fields = settings.run_fields(1)
    del fields["batch_size"]
    weights = sum(parameter.nbytes for parameter in variant.model.parameters())
    by_formula = variant.layout.largest_batch(
        max(0, available - weights), fields["context_length"], variant.dtype
    )
    attempt = DecodeAttempt(
        variant.model.config, variant.serving, variant.dtype, device.type,
        settings.prompt_tokens, settings.new_tokens, settings.memory, torch.get_num_threads(),
    )  # fmt: skip

    def on_attempt(batch: int, is_fitting: bool) -> None:
        session.on_turn(f"batch {batch} {'fits' if is_fitting else 'does not fit'}")

    largest = find_largest_batch(attempt, by_formula, on_attempt)
    session.largest_batches[variant.name] = largest
    yield session.make_line(
        "limit", "largest_batch", variant, largest, "sequences", note=source, **fields
    )
    yield session.make_line(
        "limit", "largest_batch_formula", variant, by_formula, "sequences", exact=True,
        note=f"{source}, weights and cache alone", **fields,
    )  # fmt: skip
