"""Freed memory that stays: pages are faulted in once, and given back at the end."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")

FAULTS = """
import ctypes, resource
from contextlib import nullcontext
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


first = resident()
with keep_freed_memory():
    faults()
    print(faults() < 100, end=" ")
print(resident() - first < SIZE // 2, end=" ")
print(faults() > 1000, end=" ")
with keep_freed_memory("cuda"):
    faults()
    print(faults() > 1000)
"""


def output(**environment):
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=given, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_inside_pages_are_faulted_in_once_and_afterwards_memory_goes_back():
    assert output(KVLAB_PLAIN="0") == ["True", "True", "True", "True"]


@pytest.mark.parametrize("environment", [{"KVLAB_PLAIN": "1"}, {"MALLOC_TOP_PAD_": "131072"}])
def test_plain_code_and_what_the_environment_sets_leave_malloc_alone(environment):
    assert output(**environment)[0] == "False"
