"""The table of kernels, and how one is added."""

import os
import subprocess
import sys

import torch

from kvlab.model.causal_mask import CausalMask
from kvlab.model.kernels import KERNELS
from kvlab.model.kernels.malloc import keep_freed_memory
from kvlab.model.kernels.rotate_pairs import rotate_pairs
from kvlab.model.kernels.tiled_attention import tiled_attention
from kvlab.model.rope import make_rope_table
from tests.contracts.attention_backend_contract import random_documents
from tests.contracts.cpu_kernel_contract import CPUKernelContract
from tests.model.kernels import test_gelu, test_linear  # noqa: F401 (suites of kernels)


class TestRotatePairsKernel(CPUKernelContract):
    kernel = rotate_pairs

    def cases(self):
        torch.manual_seed(0)
        for positions in (torch.arange(7) + 90, torch.tensor([[3] * 7, [50] * 7])):
            table = make_rope_table(positions, 8, 10_000.0, torch.float32)
            for requires_grad in (False, True):
                yield [torch.randn(2, 3, 7, 8).requires_grad_(requires_grad), *table]


class TestTiledAttentionKernel(CPUKernelContract):
    """See also the suite of attention backends."""

    kernel = tiled_attention

    def cases(self):
        torch.manual_seed(0)
        for window in (None, 40):
            for documents in (None, random_documents(300)):
                heads = (4, 2, 2)
                inputs = [torch.randn(2, n, 300, 16).requires_grad_() for n in heads]
                yield [*inputs, CausalMask(window, 0, documents)]


def test_every_kernel_has_its_suite():
    """What frees no tensor and computes none has tests of its own."""
    tested = {id(suite.kernel) for suite in CPUKernelContract.__subclasses__()}
    assert tested == {id(k) for k in KERNELS.values()} - {id(keep_freed_memory)}


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
