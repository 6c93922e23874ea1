"""The products for few rows: equal to torch's own, whatever the shape."""

import pytest
import torch
import torch.nn.functional as F

from kvlab.model.linear import FEW_ROWS, TWO_COLUMNS_INPUTS, Linear, linear


@pytest.mark.parametrize("inputs", [1, 48, TWO_COLUMNS_INPUTS, TWO_COLUMNS_INPUTS + 1])
@pytest.mark.parametrize("lead", [(1,), (2,), (1, 1), (2, 1), (1, 2), (3,), (FEW_ROWS,),
                                  (FEW_ROWS + 1,), (5, 7), (0,)])  # fmt: skip
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_float64(lead, inputs, has_bias):
    torch.manual_seed(0)
    x, weight = torch.randn(*lead, inputs), torch.randn(37, inputs)
    bias = torch.randn(37) if has_bias else None
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with torch.inference_mode():
        found = linear(x, weight, bias)
    assert found.shape == wanted.shape
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert torch.allclose(found.double(), wanted, rtol=0, atol=1e-5 * inputs**0.5 + 1e-6)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_takes_parts_of_tensors(rows):
    """As decoding gives it: rows cut from a longer text, rows of a weight."""
    torch.manual_seed(1)
    x, weight, bias = torch.randn(rows, 5, 64)[:, -1:], torch.randn(90, 64), torch.randn(90)
    with torch.inference_mode():
        found = linear(x, weight[:30], bias[:30])
    assert (found - F.linear(x, weight[:30], bias[:30])).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_gradients_are_torchs_own(rows):
    torch.manual_seed(2)
    layer, x = Linear(24, 10), torch.randn(rows, 24, requires_grad=True)
    other = torch.nn.Linear(24, 10)
    other.load_state_dict(layer.state_dict())
    y = x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    other(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(layer.weight.grad, other.weight.grad)
