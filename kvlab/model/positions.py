"""Rotary position embedding (RoFormer, arXiv 2104.09864), at absolute positions before caching.

Pairs are (i, i + D/2) of a head, as in the Llama and Mistral checkpoints; the article pairs
neighbours (2i, 2i + 1), which is the same up to a fixed permutation of a head's dimensions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class RopeTable(NamedTuple):
    """cos and sin, (C, D/2), or (B, 1, C, D/2) where rows differ."""

    cos: Tensor
    sin: Tensor


def rope_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> RopeTable:
    """The rotation at ``positions`` (C,) or (B, C). Angles are taken in float64: at position
    100,000 float32 would already be off by a hundredth of a radian."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64)[..., None] * theta ** (-pairs / head_dim)
    if angles.dim() == 3:
        angles = angles[:, None]
    return RopeTable(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rope(x: Tensor, rotation: RopeTable | None) -> Tensor:
    """Rotates x (B, H, C, D), in the rotation's precision; without a rotation, x itself.

    The result is of x's dtype: under autocast Q and K would else be float32 beside a bfloat16 V.
    Differentiable once, unless it is compiled.
    """
    if rotation is None:
        return x
    if torch.compiler.is_compiling():
        first, second = x.chunk(2, -1)
        cos, sin = rotation
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _RopeFunction.apply(x, *rotation)  # type: ignore[no-untyped-call]
        return out
    return _rotate_pairs(x, *rotation, 1)


class _RopeFunction(torch.autograd.Function):
    """Four operations each way, where the formula takes seven, and its derivative ten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_pairs(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_pairs(outer, cos, sin, -1), None, None


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    first, second = x.to(cos.dtype).chunk(2, -1)
    turned_first, turned_second = out.chunk(2, -1)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin, value=direction)
    return out.to(x.dtype)
