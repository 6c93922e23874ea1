"""The most memory that this process has in RAM while something runs.

Linux keeps that peak for every process and lets the process reset it, so nothing is missed, and
no second process is needed. Memory that the C library has been given back but keeps is returned
to the system first: otherwise it would be used again unseen. The kernel counts to about 0.2 MB,
and as closely do repeated runs of one decode agree; two cells' peaks differ by their caches.
"""

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

SAMPLE_SECONDS = 0.001

_YOUNG_GENERATION = 1
"""Python's generation of what was made since its last full collection: what earlier work may have
left. All generations take from 0.1 s, in a process that has loaded torch and Ray, to 0.5 s."""

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_growth(work: Callable[[], object]) -> int:
    """Bytes by which the resident size rose at most while ``work`` ran."""
    gc.collect(_YOUNG_GENERATION)
    _return_free_memory()
    if not _reset_peak():
        return _sampled_growth(work)
    before = _status_bytes("VmRSS")
    work()
    return max(0, _status_bytes("VmHWM") - before)


def _return_free_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _reset_peak() -> bool:
    """Sets the kernel's peak to the size of now; false where there is no such thing."""
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_STATUS} has no {key}")


def _sampled_growth(work: Callable[[], object]) -> int:
    """Elsewhere a second thread looks every millisecond; what is shorter may be missed."""
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(SAMPLE_SECONDS):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(peak, process.memory_info().rss) - before
