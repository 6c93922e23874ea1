"""Linear layers: equal to torch's own in float64, whatever the shape."""

import copy

import pytest
import torch
import torch.nn.functional as F

from kvlab.model.kernels.linear import TWO_COLUMN_MAX_INPUTS, Linear, linear, matmul_transposed
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
        yield from (random_case(*shape, False) for shape in shapes)
        yield from (random_case(*shape, True, has_bias=False) for shape in shapes)
        yield from (random_case(*shape, True) for shape in [*shapes, ((3, 5), 24, 10)])


class TestMatmulKernel(CPUKernelContract):
    kernel = matmul_transposed

    def cases(self):
        yield [torch.randn(200, 64), torch.randn(500, 64)]


@pytest.mark.parametrize("inputs", [1, TWO_COLUMN_MAX_INPUTS, TWO_COLUMN_MAX_INPUTS + 1])
@pytest.mark.parametrize("lead", [(1,), (2,), (2, 1), (1, 2), (17,), (0,)])
def test_equals_float64(lead, inputs):
    torch.manual_seed(0)
    outputs = 37 if lead == (2, 1) else 1000
    x, weight = torch.randn(*lead, inputs), torch.randn(outputs, inputs)
    bias = None if lead == (2,) else torch.randn(outputs)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with torch.inference_mode():
        actual = linear(x, weight, bias)
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    assert actual.is_contiguous()
    assert torch.allclose(actual.double(), expected, rtol=0, atol=1e-5 * inputs**0.5 + 1e-6)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_takes_parts_of_tensors(rows):
    """As decoding gives it: rows cut from a longer text, rows of a weight."""
    torch.manual_seed(1)
    x, weight, bias = torch.randn(rows, 5, 64)[:, -1:], torch.randn(900, 64), torch.randn(900)
    for count in (30, 600):
        with torch.inference_mode():
            actual = linear(x, weight[:count], bias[:count])
        assert (actual - F.linear(x, weight[:count], bias[:count])).abs().max() < 1e-5


@pytest.mark.parametrize(("lead", "has_bias"), [((1,), True), ((300,), False), ((3, 5), True)])
@pytest.mark.parametrize("needs_gradient", [(True, True), (False, True), (True, False)])
def test_value_and_gradients_equal_float64(lead, has_bias, needs_gradient):
    torch.manual_seed(2)
    layer, x = Linear(24, 10, bias=has_bias), torch.randn(*lead, 24)
    layer.weight.requires_grad_(needs_gradient[1])
    exact, y = copy.deepcopy(layer).double(), x.double().requires_grad_(needs_gradient[0])
    actual = layer(x.requires_grad_(needs_gradient[0]))
    expected = F.linear(y, exact.weight, exact.bias)
    assert (actual - expected).abs().max() < 1e-5
    actual.square().sum().backward()
    expected.square().sum().backward()
    pairs = [(x, y), *zip(layer.parameters(), exact.parameters(), strict=True)]
    for ours, theirs in pairs:
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            assert (ours.grad - theirs.grad).abs().max() < 1e-5 * theirs.grad.abs().max()


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
