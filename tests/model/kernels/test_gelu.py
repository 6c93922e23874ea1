"""The sigmoid form of GELU against torch's tanh form in float64."""

import pytest
import torch
import torch.nn.functional as F

from kvlab.model.kernels.gelu import gelu
from tests.contracts.cpu_kernel_contract import CPUKernelContract, kernels_on


class TestGeluKernel(CPUKernelContract):
    kernel = gelu

    def cases(self):
        torch.manual_seed(0)
        yield [torch.randn(300, 100)]
        yield from ([torch.randn(shape).requires_grad_()] for shape in [(3, 7, 5), (257, 1024)])


@kernels_on  # the plain code is less exact
@pytest.mark.parametrize("shape", [(1,), (257, 1024), (0, 4)])
def test_value_and_gradient_equal_float64(shape):
    """Also of an input that is transposed."""
    torch.manual_seed(0)
    x, outer = torch.randn(shape) * 3, torch.randn(shape)
    x = x.T.contiguous().T if len(shape) > 1 else x
    exact = x.double().requires_grad_()
    expected = F.gelu(exact, approximate="tanh")
    expected.backward(outer.double())
    actual = gelu(x.requires_grad_())
    actual.backward(outer)
    assert actual.shape == shape
    assert torch.allclose(actual.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.allclose(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(gelu(x).double(), expected, rtol=1e-6, atol=1e-6)


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
