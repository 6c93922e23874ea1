# ruff: noqa: ARG001 (not every kernel is selected by all of its arguments)
"""Keep the memory that a model's passes free in the process, for the next pass, or return it.

glibc returns a large buffer to the system when it is freed, so every step faults its pages in and
has them cleared again. Keeping them costs some 10% more peak memory. Once glibc has seen buffers
of up to 32 MiB freed, it keeps them by itself, in a heap with gaps. Beside it, what Linux knows of
the memory of this process.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from kvlab.model.kernels.cpu_kernel import CPUKernel

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Names in glibc's malloc.h; the settings are described in mallopt(3)."""

_NEVER = 2**31 - 1
_DEFAULT_MMAP_MAX = 65536
_DEFAULT_THRESHOLD = 128 * 2**10
_MAX_DYNAMIC_THRESHOLD = 32 * 2**20
"""The most that glibc's own rule raises its threshold to; any setting ends that rule."""

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def keep_freed_memory_plain(device: str = "cpu") -> AbstractContextManager[None]:
    """Run a block that computes on ``device``, a device type such as ``cpu``."""
    return nullcontext()


def _select_malloc_settings(
    device: str = "cpu",
) -> Callable[[str], AbstractContextManager[None]] | None:
    return None if device != "cpu" or _find_glibc() is None else _change_malloc_settings


keep_freed_memory = CPUKernel("keep_freed_memory", keep_freed_memory_plain, _select_malloc_settings)
"""`keep_freed_memory_plain`; on Linux with glibc no freed memory returns to the system inside the
block, and all does at its end. Nothing changes for a model on another device, nor where the
environment sets malloc (``GLIBC_TUNABLES``, ``MALLOC_*_``)."""


@contextmanager
def _change_malloc_settings(device: str = "cpu") -> Iterator[None]:
    libc = _find_glibc()
    assert libc is not None, "selected without glibc"
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_MAX, _DEFAULT_MMAP_MAX)
        _end_dynamic_threshold(libc)
        libc.malloc_trim(0)


def _end_dynamic_threshold(libc: ctypes.CDLL) -> None:
    libc.mallopt(_MMAP_THRESHOLD, _MAX_DYNAMIC_THRESHOLD)
    libc.mallopt(_TRIM_THRESHOLD, 2 * _MAX_DYNAMIC_THRESHOLD)


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Return every buffer above 128 KiB to the system when it is freed inside the block.

    The size of the process is then that of what is in use. Nothing changes without glibc, nor
    where the environment sets malloc. Free memory of the calling thread's heap is still used
    first, so the block belongs in a new thread, which has a heap of its own.
    """
    libc = _find_glibc()
    if libc is None:
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _DEFAULT_THRESHOLD)
    libc.mallopt(_TRIM_THRESHOLD, _DEFAULT_THRESHOLD)
    try:
        yield
    finally:
        _end_dynamic_threshold(libc)


def _find_glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc and the environment leaves its malloc alone."""
    is_configured = any(
        name == "GLIBC_TUNABLES" or (name.startswith("MALLOC_") and name.endswith("_"))
        for name in os.environ
    )
    if is_configured or not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def return_free_memory() -> None:
    """Return what the C library holds of freed memory to the system, as far as it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def reset_resident_peak() -> bool:
    """Set the kernel's peak to the current size. Return whether the system supports it."""
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def read_status_bytes(key: str) -> int:
    """Return a size of this process as Linux states it, such as ``VmRSS``.

    Raises:
        OSError: the system does not state it.
    """
    for line in _STATUS.read_text().splitlines() if _STATUS.exists() else ():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"this system does not report how much memory a process has ({key})")
