"""The sigmoid form of GELU against torch's tanh form in float64."""

import torch
import torch.nn.functional as F

from kvlab.model.kernels.gelu import gelu
from tests.contracts.cpu_kernel_contract import CPUKernelContract


class TestGeluKernel(CPUKernelContract):
    kernel = gelu

    def cases(self):
        torch.manual_seed(0)
        yield [torch.randn(300, 100) * 3]
        shapes = [(1,), (0, 4), (3, 7, 5), (257, 1024)]
        yield from ([torch.randn(shape).requires_grad_()] for shape in shapes)
        yield [torch.randn(30, 20).T.requires_grad_()]


def test_far_from_zero_it_is_the_identity_or_nothing():
    x = torch.tensor([-1e4, -50.0, 50.0, 1e4], requires_grad=True)
    gelu(x).sum().backward()
    assert torch.equal(gelu(x).abs(), torch.tensor([0.0, 0.0, 50.0, 1e4]))
    assert torch.equal(x.grad, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    with torch.no_grad():
        many = gelu(x.repeat(5000))
    assert torch.equal(many.abs(), torch.tensor([0.0, 0.0, 50.0, 1e4]).repeat(5000))


def test_bfloat16_is_rounded_once():
    x = torch.randn(2000).bfloat16().requires_grad_()
    assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))
