"""Time to report sweeps of 1,000 and 10,000 trials, and its growth."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvlab.report import write_report
from tests.support.record_factory import Record

SIZES = {1_000: (10, 10, 5), 10_000: (10, 10, 10, 5)}
"""Trials -> levels of the factors; two seeds each."""

LIMITS = {1_000: 10.0, 10_000: 60.0}


def big_record(levels: tuple[int, ...], seeds: int = 2, points: int = 20) -> Record:
    """A full factorial with curves and one known effect."""
    factors = {
        f"factor{n}": tuple(f"f{n}-{level}" for level in range(count))
        for n, count in enumerate(levels)
    }
    return Record(factors=factors, effects={"f0-1": 0.1}, seeds=tuple(range(seeds)), points=points)


def run() -> Iterator[str]:
    """One line a size, the record's writing left out."""
    seconds: dict[int, float] = {}
    for trials, levels in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            store = big_record(levels).write(Path(folder) / "store")
            started = time.perf_counter()
            write_report(store, "made", Path(folder))
            seconds[trials] = time.perf_counter() - started
        within = "within" if seconds[trials] <= LIMITS[trials] else "OVER"
        yield f"{trials:,} trials: {seconds[trials]:.1f} s ({within} {LIMITS[trials]:.0f} s)"
    small, large = min(seconds), max(seconds)
    growth = seconds[large] / seconds[small]
    yield f"{large // small} times the trials take {growth:.1f} times as long"
