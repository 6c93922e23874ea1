"""Keep the memory that a model's passes free in the process, for the next pass.

glibc returns a large buffer to the system when it is freed, so every step faults its pages in and
has them cleared again. Keeping them costs some 10% more peak memory.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from kvlab.model.kernels.cpu_kernel import CPUKernel

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Names in glibc's malloc.h; the settings are described in mallopt(3)."""

_NEVER = 2**31 - 1
_DEFAULT_MMAP_MAX = 65536
_MAX_DYNAMIC_THRESHOLD = 32 * 2**20
"""The most that glibc's own rule raises its threshold to; any setting ends that rule."""


def keep_freed_memory_plain(
    device: str = "cpu",  # noqa: ARG001  (the signature of the kernel)
) -> AbstractContextManager[None]:
    """Run a block that computes on ``device``, a device type such as ``cpu``."""
    return nullcontext()


def _select_malloc_settings(
    device: str = "cpu",
) -> Callable[[str], AbstractContextManager[None]] | None:
    return None if device != "cpu" or _find_glibc() is None else _change_malloc_settings


keep_freed_memory = CPUKernel(keep_freed_memory_plain, _select_malloc_settings)
"""`keep_freed_memory_plain`; on Linux with glibc no freed memory returns to the system inside the
block, and all does at its end. Nothing changes for a model on another device, nor where the
environment sets malloc (``GLIBC_TUNABLES``, ``MALLOC_*_``)."""


@contextmanager
def _change_malloc_settings(device: str = "cpu") -> Iterator[None]:  # noqa: ARG001
    libc = _find_glibc()
    assert libc is not None, "selected without glibc"
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_MAX, _DEFAULT_MMAP_MAX)
        libc.mallopt(_MMAP_THRESHOLD, _MAX_DYNAMIC_THRESHOLD)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _MAX_DYNAMIC_THRESHOLD)
        libc.malloc_trim(0)


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
