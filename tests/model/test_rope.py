"""Rotary positions against complex multiplication, and their derivative against autograd's."""

from contextlib import nullcontext

import pytest
import torch

from kvlab.cache import DocumentMask
from kvlab.model.kernels.cpu_kernel import use_plain_code
from kvlab.model.rope import RotaryTables, apply_rope, make_rope_table

THETA = 10_000.0


def rotate_by_complex_numbers(x, positions):
    """Rotate each pair (i, i + D/2), as a complex number, by position times its frequency."""
    pairs = x.shape[-1] // 2
    number = torch.complex(x[..., :pairs], x[..., pairs:])
    frequency = THETA ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = positions[..., None].double() * frequency
    if angle.dim() == 3:
        angle = angle[:, None]
    rotated = number * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([rotated.real, rotated.imag], -1)


@pytest.mark.parametrize("positions", [torch.arange(7) + 90, torch.tensor([[3] * 7, [50] * 7])])
def test_pairs_rotate_as_complex_numbers_do(positions):
    token_by_token = torch.randn(2, 7, 3, 8, dtype=torch.float64, requires_grad=True)
    x = token_by_token.transpose(1, 2)
    actual = apply_rope(x, make_rope_table(positions, 8, THETA, torch.float64))
    expected = rotate_by_complex_numbers(x, positions)
    assert (actual - expected).abs().max() < 1e-12
    outer = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(actual, token_by_token, outer)
    (expected_gradient,) = torch.autograd.grad(expected, token_by_token, outer)
    assert (gradient - expected_gradient).abs().max() < 1e-12
    with torch.no_grad():
        assert torch.equal(
            apply_rope(x, make_rope_table(positions, 8, THETA, torch.float64)), actual
        )


@pytest.mark.parametrize("mode", [nullcontext, use_plain_code])
def test_a_smaller_type_is_rounded_once_either_way(mode):
    x = torch.randn(1, 2, 7, 8).bfloat16().requires_grad_()
    exact = x.detach().float().requires_grad_()
    table = make_rope_table(torch.arange(7), 8, THETA, torch.float32)
    with mode():
        for each in (x, exact):
            apply_rope(each, table).backward(x.detach().to(each.dtype))
        assert torch.equal(apply_rope(x, table), apply_rope(exact, table).bfloat16())
    assert torch.equal(x.grad, exact.grad.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tables_hold_the_same_bits_as_angles_computed_in_place(dtype):
    tables = RotaryTables(8, THETA)
    with torch.inference_mode():
        tables.prepare(3, torch.device("cpu"), dtype)  # is to grow, and to serve a training
    documents = DocumentMask(torch.tensor([[5, 0, 5, 5, 0, 5]]), 0).positions
    for positions in (torch.arange(9), torch.arange(70, 75), torch.tensor([[3], [50]]), documents):
        table = tables.at(positions, int(positions.max()) + 1, dtype)
        expected = make_rope_table(positions, 8, THETA, dtype)
        for part, expected_part in zip(table, expected, strict=True):
            assert torch.equal(part, expected_part)
            assert not part.is_inference()
