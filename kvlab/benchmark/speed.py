"""Latency at batch 1 with and without the cache, and throughput at the largest batch."""

from collections.abc import Callable

import numpy as np

from kvlab.benchmark.decode import Decoder, Timing

UNCACHED_STEPS = 16
"""Steps that are timed without a cache, spread evenly over the new tokens: each is a full
forward pass, and their median is that of all steps, since the time grows with the context."""


def speed_measurements(
    decoder: Decoder, largest_batch: int, repeats: int, tick: Callable[[], None]
) -> dict[str, float | int]:
    """Times by the names of `kvlab.trial.metrics`.

    One run of each kind warms up and is thrown away. Then the kinds take turns, so that a
    machine that slows down meanwhile slows all of them.
    """
    caches = {batch: decoder.new_cache(batch) for batch in {1, largest_batch}}
    for batch, cache in caches.items():
        decoder.decode(batch, cache)
        tick()
    decoder.decode_again(0)
    timings: dict[int, list[Timing]] = {batch: [] for batch in caches}
    uncached: list[float] = []
    for repeat in range(repeats):
        for batch, cache in caches.items():
            timings[batch].append(decoder.decode(batch, cache))
            tick()
        for step in _spread(decoder.new_tokens)[repeat::repeats]:
            uncached.append(decoder.decode_again(step))
            tick()
    alone, many = timings[1], timings[largest_batch]
    steps = [seconds for timing in alone for seconds in timing.steps]
    run_seconds = float(np.median([sum(timing.steps) for timing in many]))
    return {
        "ttft_ms": _milliseconds([timing.first for timing in alone], 50),
        "tpot_ms_p50": _milliseconds(steps, 50),
        "tpot_ms_p95": _milliseconds(steps, 95),
        "tpot_ms_uncached_p50": _milliseconds(uncached, 50),
        "tokens_per_second": largest_batch * decoder.new_tokens / run_seconds,
    }


def _spread(count: int) -> list[int]:
    """Up to `UNCACHED_STEPS` of 0 to ``count - 1``, evenly and symmetrically spread."""
    wanted = min(count, UNCACHED_STEPS)
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


def _milliseconds(seconds: list[float], percentile: float) -> float:
    return float(np.percentile(seconds, percentile)) * 1000.0
