"""The rotation against complex multiplication, and its derivative against torch's own."""

import pytest
import torch

from kvlab.model.rope import apply_rope, rope_table

THETA = 10_000.0


def by_complex_numbers(x, positions):
    """A pair (i, i + D/2) is a number, turned by position times its frequency."""
    pairs = x.shape[-1] // 2
    number = torch.complex(x[..., :pairs], x[..., pairs:])
    frequency = THETA ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = positions[..., None].double() * frequency
    if angle.dim() == 3:
        angle = angle[:, None]
    turned = number * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("positions", [torch.arange(7) + 90, torch.tensor([[3] * 7, [50] * 7])])
def test_pairs_turn_as_complex_numbers_do(positions):
    token_by_token = torch.randn(2, 7, 3, 8, dtype=torch.float64, requires_grad=True)
    x = token_by_token.transpose(1, 2)
    found = apply_rope(x, rope_table(positions, 8, THETA, torch.float64))
    wanted = by_complex_numbers(x, positions)
    assert (found - wanted).abs().max() < 1e-12
    outer = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    (mine,) = torch.autograd.grad(found, token_by_token, outer)
    (theirs,) = torch.autograd.grad(wanted, token_by_token, outer)
    assert (mine - theirs).abs().max() < 1e-12
    with torch.no_grad():
        assert torch.equal(apply_rope(x, rope_table(positions, 8, THETA, torch.float64)), found)


def test_a_smaller_type_is_rounded_once():
    x = torch.randn(1, 2, 7, 8).bfloat16().requires_grad_()
    turn = rope_table(torch.arange(7), 8, THETA, torch.float32)
    found = apply_rope(x, turn)
    found.backward(torch.ones_like(found))
    assert found.dtype == x.grad.dtype == torch.bfloat16
    assert torch.equal(found, apply_rope(x.float(), turn).bfloat16())


def test_compiled_it_is_the_same():
    x = torch.randn(1, 2, 7, 8, dtype=torch.float64, requires_grad=True)
    turn = rope_table(torch.arange(7), 8, THETA, torch.float64)
    compiled = torch.compile(apply_rope, backend="eager", fullgraph=True)
    (mine,) = torch.autograd.grad(apply_rope(x, turn).square().sum(), x)
    (theirs,) = torch.autograd.grad(compiled(x, turn).square().sum(), x)
    assert (mine - theirs).abs().max() < 1e-12
