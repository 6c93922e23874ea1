"""Memory of decoding: the cache in exact bytes, and the peak with and without it."""

from collections.abc import Callable

import torch

from kvlab.benchmark.decode import Decoder
from kvlab.benchmark.resident import resident_growth
from kvlab.errors import MeasurementError
from kvlab.layout import KVLayout
from kvlab.model import GPT
from kvlab.spec.parts import ServingConfig

PEAK_RUNS = 2
"""Runs of each peak. The least is taken: whatever else goes on in the process only adds."""


def kv_measurements(model: GPT, serving: ServingConfig) -> dict[str, float | int]:
    """KV bytes at batch 1 and the block size, by formula and as they are.

    Raises:
        MeasurementError: formula, storages and, on CUDA, the allocator do not agree.
    """
    layout, block = KVLayout.of(model.config, serving), model.config.block_size
    dtype = str(model.dtype).removeprefix("torch.")
    formula = layout.stored_bytes(1, block, dtype)
    allocated = _requested_bytes(model.device)
    cache = model.new_cache(1, block, serving)
    agree("KV bytes by unique storage", cache.nbytes, formula)
    if allocated is not None:
        now = _requested_bytes(model.device)
        agree("KV bytes asked of the CUDA allocator", (now or 0) - allocated, formula)
    return {
        "kv_bytes_formula": formula,
        "kv_bytes_storage": cache.nbytes,
        "kv_bytes_read": layout.read_bytes(1, block, dtype),
    }


def agree(name: str, measured: int, formula: int) -> None:
    """Raises MeasurementError unless two exact byte counts are equal."""
    if measured != formula:
        text = f"{name} are {measured:,} and by formula {formula:,}"
        raise MeasurementError(f"{text}; one of them is wrong, so no result is kept")


def _requested_bytes(device: torch.device) -> int | None:
    """Bytes asked of the allocator and not freed yet, before it rounds; None if not CUDA's."""
    if device.type != "cuda":
        return None
    return torch.cuda.memory_stats(device).get("requested_bytes.all.current")


def peak_measurements(decoder: Decoder, tick: Callable[[], None]) -> dict[str, float | int]:
    """Peak bytes of decoding one sequence to its last token, with and without the cache.

    That is the weights, and the most that the run adds to them: cache, activations, logits of
    the last position, and the scratch memory of kernels. On CUDA by the allocator, on CPU by
    the resident size of the process. Run the decoder once before, so that libraries are loaded.
    """
    model = decoder.model
    weights = sum(parameter.nbytes for parameter in model.parameters())
    found: dict[str, float | int] = {}
    works: dict[str, Callable[[], object]] = {
        "peak_bytes_cached": lambda: decoder.decode(1, decoder.new_cache(1)),
        "peak_bytes_uncached": lambda: decoder.decode_again(decoder.new_tokens - 1),
    }
    for name, work in works.items():
        growths = []
        for _ in range(PEAK_RUNS):
            growths.append(_growth(model.device, work))
            tick()
        found[name] = weights + min(growths)
    return found


def _growth(device: torch.device, work: Callable[[], object]) -> int:
    if device.type != "cuda":
        return resident_growth(work)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
