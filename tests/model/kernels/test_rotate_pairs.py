"""The rotation of pairs against its plain reference."""

import torch

from kvlab.model.kernels.rotate_pairs import rotate_pairs
from kvlab.model.rope import make_rope_table
from tests.contracts.cpu_kernel_contract import CPUKernelContract


class TestRotatePairsKernel(CPUKernelContract):
    kernel = rotate_pairs

    def cases(self):
        torch.manual_seed(0)
        for positions in (torch.arange(7) + 90, torch.tensor([[3] * 7, [50] * 7])):
            table = make_rope_table(positions, 8, 10_000.0, torch.float32)
            for requires_grad in (False, True):
                yield [torch.randn(2, 3, 7, 8).requires_grad_(requires_grad), *table]
