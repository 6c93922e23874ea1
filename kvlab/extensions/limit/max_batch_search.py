"""Find the largest batch that fits, by trying each size in a process of its own.

A process that ran out of memory once is unreliable afterwards: its allocator is fragmented and
its traceback holds tensors. A new process per attempt leaves nothing behind.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable

from kvlab.errors import MeasurementError

MAX_BATCH = 2**24

OUT_OF_MEMORY_EXIT = 3
"""Exit code of an attempt that ran out of memory."""

CRASH_SIGNALS = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)

Attempt = Callable[[int], None]
"""Tries one batch size and raises MemoryError if it does not fit. Picklable. One under a limit of
memory has ``without_limit()``, which returns the same attempt without it."""


def find_largest_batch(
    attempt: Attempt, guess: int, on_attempt: Callable[[int, bool], None]
) -> int:
    """Return the largest batch for which ``attempt`` succeeds; 0 if none does.

    It is exact up to 199, and too small by less than 1% beyond: on a GPU an attempt takes ten
    seconds, most of them to start.

    Args:
        attempt: is expected to fit up to some batch and not beyond.
        guess: where to start. The nearer to the answer, the fewer attempts.
        on_attempt: called after every attempt with the batch and whether it fitted.

    Raises:
        MeasurementError: an attempt failed for another reason than memory.
    """

    def fits(batch: int) -> bool:
        is_fitting = fits_in_new_process(attempt, batch)
        on_attempt(batch, is_fitting)
        return is_fitting

    step, high = max(1, guess // 8), min(max(1, guess), MAX_BATCH)
    if fits(high):
        while True:
            low, high, step = high, min(high + step, MAX_BATCH), 2 * step
            if low == MAX_BATCH or not fits(high):
                break
    else:
        low = high - step
        while low > 0 and not fits(low):
            low, high, step = low - 2 * step, low, 2 * step
        low = max(0, low)
    while high - low > max(1, low // 100):
        between = (low + high) // 2
        low, high = (between, high) if fits(between) else (low, between)
    return low


def fits_in_new_process(attempt: Attempt, batch: int) -> bool:
    """Run ``attempt(batch)`` in a new process and return whether it succeeded.

    Raises:
        MeasurementError: it failed for another reason than memory.
    """
    process = _run_in_new_process(attempt, batch)
    if process.returncode == 0:
        return True
    # Linux ends a process with -9 when all memory is in use
    if process.returncode in (OUT_OF_MEMORY_EXIT, -signal.SIGKILL):
        return False
    # some libraries crash when an allocation fails; without the limit they do not
    if process.returncode in CRASH_SIGNALS and hasattr(attempt, "without_limit"):
        unlimited = _run_in_new_process(attempt.without_limit(), batch)
        if unlimited.returncode == 0:
            return False
    lines = process.stderr.decode(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else f"exit code {process.returncode}"
    raise MeasurementError(f"batch {batch} could not be tried: {reason}")


def _run_in_new_process(attempt: Attempt, batch: int) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvlab.extensions.limit.max_batch_search"],
        input=pickle.dumps((attempt, batch)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        check=False,
    )


if __name__ == "__main__":  # the attempt that the parent process pickled
    asked, size = pickle.load(sys.stdin.buffer)
    try:
        asked(size)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY_EXIT)
