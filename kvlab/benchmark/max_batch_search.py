"""The largest batch that fits, by trying: every try in a process of its own, which ends.

A process that has once run out of memory is no witness any more: its allocator is fragmented,
its traceback holds tensors. So each try is a new one, and when it is over nothing is left of it.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from kvlab.errors import MeasurementError

MAX_BATCH = 2**24

OUT_OF_MEMORY_EXIT = 3
"""Exit code of a try for which there was not enough."""

CRASH_SIGNALS = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)

Attempt = Callable[[int], None]
"""Tries one batch size. MemoryError: it does not fit. Picklable."""


@runtime_checkable
class MemoryLimited(Protocol):
    """An attempt that a limit holds."""

    def without_limit(self) -> Attempt: ...


def find_largest_batch(attempt: Attempt, guess: int, tick: Callable[[int, bool], None]) -> int:
    """The largest batch for which ``attempt`` ends well, exactly, by bisection; 0 if none does.

    Args:
        guess: where to look first; the nearer to the answer, the fewer tries.
        tick: called after every try with the batch and whether it fitted.

    Raises:
        MeasurementError: a try failed in another way than for memory.
    """

    def fits(batch: int) -> bool:
        fitted = fits_in_new_process(attempt, batch)
        tick(batch, fitted)
        return fitted

    low, high = 0, min(max(1, guess), MAX_BATCH)  # low fits, high is to be seen
    step = max(1, guess // 8)
    while fits(high):
        if high == MAX_BATCH:
            return MAX_BATCH
        low, high = high, min(high + step, MAX_BATCH)
        step *= 2
    while high - low > 1:
        middle = max(low + 1, high - step) if low == 0 else (low + high) // 2
        step *= 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fits_in_new_process(attempt: Attempt, batch: int) -> bool:
    """Whether ``attempt(batch)`` ends well in a new process, which is gone afterwards.

    Raises:
        MeasurementError: it failed, and not for want of memory.
    """
    process = subprocess.run(
        [sys.executable, "-m", "kvlab.benchmark.max_batch_search"],
        input=pickle.dumps((attempt, batch)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        check=False,
    )
    if process.returncode == 0:
        return True
    # -9 is how Linux ends a process when all memory is gone
    if process.returncode in (OUT_OF_MEMORY_EXIT, -signal.SIGKILL):
        return False
    crashed = process.returncode in CRASH_SIGNALS
    if (
        crashed
        and isinstance(attempt, MemoryLimited)
        and fits_in_new_process(attempt.without_limit(), batch)
    ):
        return False  # of a library that does not look whether it got the memory it asked for
    said = process.stderr.decode(errors="replace").strip().splitlines()
    reason = said[-1] if said else f"exit code {process.returncode}"
    raise MeasurementError(f"batch {batch} could not be tried: {reason}")


def _run_attempt() -> int:
    """Runs the attempt that stands, pickled by the parent, on standard input."""
    attempt, batch = pickle.load(sys.stdin.buffer)
    try:
        attempt(batch)
    except MemoryError:
        return OUT_OF_MEMORY_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(_run_attempt())
