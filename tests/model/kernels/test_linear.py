"""Linear layers: equal to torch's own in float64, whatever the shape."""

import torch
import torch.nn.functional as F

from kvlab.model.kernels.linear import (
    TWO_COLUMN_MAX_INPUTS,
    Linear,
    linear,
    matmul_transposed,
)
from tests.contracts.cpu_kernel_contract import CPUKernelContract


def random_case(rows, inputs, outputs, requires_grad, has_bias=True):
    torch.manual_seed(0)
    bias = torch.randn(outputs) if has_bias else None
    case = [torch.randn(*rows, inputs), torch.randn(outputs, inputs), bias]
    return [part if part is None else part.requires_grad_(requires_grad) for part in case]


class TestLinearKernel(CPUKernelContract):
    kernel = linear

    def cases(self):
        shapes = [((1,), 48, 701), ((2, 1), 96, 1000), ((64,), 768, 2304)]
        widest = TWO_COLUMN_MAX_INPUTS
        edges = [((1,), widest, 1000), ((1, 2), widest + 1, 1000), ((17,), widest, 1000)]
        yield from (random_case(*shape, False) for shape in [*shapes, *edges])
        yield from (random_case(*shape, True, has_bias=False) for shape in shapes)
        yield from (random_case(*shape, True) for shape in [*shapes, ((3, 5), 24, 10)])
        frozen = [random_case((3, 5), 24, 10, is_trained) for is_trained in (False, True)]
        yield from ([frozen[i][0], *frozen[1 - i][1:]] for i in range(2))


class TestMatmulKernel(CPUKernelContract):
    kernel = matmul_transposed

    def cases(self):
        yield [torch.randn(200, 64), torch.randn(500, 64)]


def test_takes_parts_and_gradients_of_any_layout_in_training():
    """As attention gives them: rows of a weight, transposed inputs, an expanded gradient."""
    torch.manual_seed(3)
    x, weight, bias = torch.randn(64, 50).T, torch.randn(90, 64), torch.randn(90)
    given = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    exact = [part.detach().double().requires_grad_() for part in given]
    linear(x, weight[:30], bias[:30]).sum().backward()
    F.linear(exact[0], exact[1][:30], exact[2][:30]).sum().backward()
    for ours, theirs in zip(given, exact, strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-4


def test_autocast_is_obeyed_in_training():
    layer, x = Linear(24, 10), torch.randn(50, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
