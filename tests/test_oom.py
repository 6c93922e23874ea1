"""Out-of-memory errors of libraries, each with its own message."""

import errno
import subprocess
import sys

import pytest
import torch

from kvlab.store.result import classify_error


class AcceleratorError(RuntimeError):
    """Named as torch's, which cannot be made without a device."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "device_memory"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "device_memory"),
        (AcceleratorError("CUDA error: out of memory"), "device_memory"),
        (RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"), "device_memory"),
        (RuntimeError("HIP out of memory. Tried to allocate"), "device_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "device_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device_memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
                      "allocate memory: you tried to allocate 8 bytes. Error code 12 (Cannot "
                      "allocate memory)"), "host_memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), "host_memory"),
        (RuntimeError("could not create a primitive"), "host_memory"),
        (RuntimeError("std::bad_alloc"), "host_memory"),
        (RuntimeError("unable to mmap 8 bytes from file: Cannot allocate memory"), "host_memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host_memory"),
        (MemoryError(), "host_memory"),
        (RuntimeError("could not create a primitive descriptor for a matmul"), "bug"),
        (RuntimeError("CUDA error: device-side assert triggered"), "bug"),
        (RuntimeError("CUDNN_STATUS_EXECUTION_FAILED"), "bug"),
        (OSError(errno.ENOSPC, "No space left on device"), "bug"),
        (ValueError("memory = out of memory is no number"), "bug"),
        (KeyError("bad_alloc"), "bug"),
    ],
)  # fmt: skip
def test_out_of_memory_messages_of_libraries_are_classified(error, kind):
    assert classify_error(error) == kind


def test_real_out_of_memory_errors_are_classified():
    """In a process that may take no more: torch's allocator, Python's and the system's."""
    code = """
import mmap, resource, torch
from kvlab.oom import classify_oom
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
for take in (
    lambda: torch.empty(1 << 40),
    lambda: bytearray(1 << 40),
    lambda: mmap.mmap(-1, 1 << 40),
):
    try:
        take()
    except Exception as error:
        print(type(error).__name__, classify_oom(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "RuntimeError host", "MemoryError host", "OSError host",
    ]  # fmt: skip
