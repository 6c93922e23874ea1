# ruff: noqa: ARG001 (not every kernel is selected by all of its arguments)
"""The rotation of rotary position embeddings, in four operations each way.

The formula takes seven operations, and its derivative ten.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvlab.model.kernels.cpu_kernel import CPUKernel


def rotate_pairs_plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of x (B, H, C, D) by an angle, in cos's dtype.

    It does so in the order (B, C, H, D), in which projections write x and read its gradient, and
    has no parts to join. So a compiler computes the gradient inside the kernel that joins those of
    Q, K and V, and attention's output needs no copy.

    Args:
        cos, sin: of the angles, (C, D/2) or (B, 1, C, D/2).

    Returns:
        (B, H, C, D) of x's dtype: under autocast Q and K would otherwise be float32 beside a
        bfloat16 V.
    """
    cos, sin = (part[:, None] if part.dim() == 2 else part.transpose(1, 2) for part in (cos, sin))
    by_token = x.transpose(1, 2).to(cos.dtype)
    halves = by_token.view(*by_token.shape[:-1], 2, -1)  # (B, C, H, 2, D/2)
    sign = 2 * torch.arange(2, device=x.device)[:, None] - 1
    rotated = halves * cos[..., None, :] + halves.flip(-2) * (sign * sin[..., None, :])
    return rotated.flatten(-2).to(x.dtype).transpose(1, 2)


def _select_rotation(
    x: Tensor, cos: Tensor, sin: Tensor
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    if torch.compiler.is_compiling():
        return None
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    return _RotationFunction.apply if needs_gradient else _rotate


rotate_pairs = CPUKernel("rotate_pairs", rotate_pairs_plain, _select_rotation)
"""`rotate_pairs_plain`; the fast implementation is differentiable once. It serves every device."""


class _RotationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad_output, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int = 1) -> Tensor:
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    return rotate_into(out, x.to(cos.dtype), cos, sin, direction).to(x.dtype)


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, direction: int = 1) -> Tensor:
    """Write `rotate_pairs` of x into ``out`` of its shape and of cos's dtype; return it.

    Args:
        direction: -1 rotates backwards.
    """
    (first, second), (rotated_first, rotated_second) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(first, cos, out=rotated_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=rotated_second).addcmul_(first, sin, value=direction)
    return out
