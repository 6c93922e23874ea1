"""Freed memory that stays: pages are faulted in once, and given back at the end."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")

FAULTS = """
import ctypes, os, resource
from kvlab.model.kernels.cpu_kernel import use_plain_code
from kvlab.model.kernels.malloc import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
SIZE = 64 * 2**20  # larger than glibc ever keeps by itself


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer = libc.malloc(SIZE)
    ctypes.memset(buffer, 1, SIZE)
    libc.free(buffer)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def second_faults(device="cpu"):
    with keep_freed_memory(device):
        faults()
        return faults()


first = resident()
print(second_faults() < 100, resident() - first < SIZE // 2, faults() > 1000)
print(second_faults("cuda") > 1000)
with use_plain_code():
    print(second_faults() > 1000)
os.environ["MALLOC_TOP_PAD_"] = "131072"
print(second_faults() > 1000)
"""


def test_inside_pages_are_faulted_in_once_and_afterwards_memory_goes_back():
    """Work on a GPU, plain code, and what the environment sets leave malloc alone."""
    paths = os.pathsep.join(filter(None, sys.path))
    given = {**os.environ, "PYTHONPATH": paths, "KVLAB_PLAIN": "0"}
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 6
