"""The table of kernels, and how one is added."""

import os
import subprocess
import sys

import torch

from kvlab.model.kernels import KERNELS
from kvlab.model.kernels.cpu_kernel import CPUKernel, use_plain_code
from kvlab.model.kernels.malloc import keep_freed_memory
from tests.contracts.cpu_kernel_contract import CPUKernelContract, kernels_on
from tests.model.kernels import test_gelu, test_linear, test_rotate_pairs, test_tiled_attention

SUITES = (test_gelu, test_linear, test_rotate_pairs, test_tiled_attention)


def test_every_kernel_has_its_suite():
    """What frees no tensor and computes none has tests of its own."""
    assert {suite.__name__ for suite in SUITES} == {one.__module__ for one in
                                                    CPUKernelContract.__subclasses__()}  # fmt: skip
    tested = {id(suite.kernel) for suite in CPUKernelContract.__subclasses__()}
    assert tested == {id(k) for k in KERNELS.values()} - {id(keep_freed_memory)}


@kernels_on
def test_a_kernel_is_a_plain_function_and_a_choice():
    double = CPUKernel(
        "double", lambda x: x + x, lambda x: (lambda y: 2 * y) if x.dim() == 1 else None
    )
    vector, matrix = torch.randn(3), torch.randn(2, 2)
    assert torch.equal(double(vector), double.plain(vector))
    assert double.is_fast(vector)
    assert not double.is_fast(matrix)
    with use_plain_code():
        assert not double.is_fast(vector)


def test_the_environment_turns_kernels_off_by_name():
    code = """
import torch
from kvlab.model.kernels import KERNELS
x = torch.ones(2).requires_grad_()
cases = {"gelu": [x], "rotate_pairs": [x, x, x]}
print(*(name for name, case in cases.items() if KERNELS[name].is_fast(*case)))
"""
    given = {**os.environ, "KVLAB_PLAIN": "gelu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "rotate_pairs"
