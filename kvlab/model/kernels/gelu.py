"""GELU in the tanh form of GPT-2, by the sigmoid.

torch's vectorised tanh is slow on CPU. With v = 2 sqrt(2/pi) (x + 0.044715 x^3),
gelu(x) = x sigmoid(v), since (1 + tanh(v/2)) / 2 is sigmoid(v). In training, value and
derivative come from one sigmoid, and only the derivative is saved; torch computes the tanh in
both passes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvlab.model.kernels.cpu_kernel import CPUKernel

_LINEAR_FACTOR = 2 * math.sqrt(2 / math.pi)
_CUBIC_FACTOR = 0.044715 * _LINEAR_FACTOR

_CHUNK_ELEMENTS = 2**17
"""Elements whose intermediate results stay in a core's cache."""

_MIN_ELEMENTS = 2**14
"""Without a gradient, from more elements on five calls here are faster than one of torch's."""


def gelu_plain(x: Tensor) -> Tensor:
    """Apply GELU in its tanh form to x of any shape."""
    return F.gelu(x, approximate="tanh")


def _select_gelu(x: Tensor) -> Callable[[Tensor], Tensor] | None:
    # torch rounds a smaller dtype once, where the passes here would round after each
    is_supported = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if not is_supported or torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() and x.requires_grad:
        return _GeluFunction.apply
    return _gelu_forward if x.numel() > _MIN_ELEMENTS else None


gelu = CPUKernel("gelu", gelu_plain, _select_gelu)
"""`gelu_plain`; the fast implementation is differentiable once."""


def _gelu_forward(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    chunks = (torch.split(tensor.view(-1), _CHUNK_ELEMENTS) for tensor in (x, out))
    for part, value in zip(*chunks, strict=True):
        # v / x
        torch.addcmul(x.new_tensor(_LINEAR_FACTOR), part, part, value=_CUBIC_FACTOR, out=value)
        value.mul_(part).sigmoid_().mul_(part)
    return out


class _GeluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        out, derivative = torch.empty_like(x), torch.empty_like(x)
        tensors = (x, out, derivative)
        chunks = (torch.split(tensor.view(-1), _CHUNK_ELEMENTS) for tensor in tensors)
        for part, value, slope in zip(*chunks, strict=True):
            # with s = sigmoid(v): gelu(x) = x s, and its derivative is s + x s (1 - s) dv/dx
            factor = torch.addcmul(  # v / x
                part.new_tensor(_LINEAR_FACTOR), part, part, value=_CUBIC_FACTOR
            )
            s = torch.mul(factor, part).sigmoid_()
            torch.mul(part, s, out=value)
            x_s_1_minus_s = torch.addcmul(value, value, s, value=-1)
            # dv/dx = _LINEAR_FACTOR + 3 _CUBIC_FACTOR x^2 = 3 (factor - 2/3 _LINEAR_FACTOR)
            dv_dx_third = factor.sub_(_LINEAR_FACTOR * 2 / 3)
            torch.addcmul(s, x_s_1_minus_s, dv_dx_third, value=3, out=slope)
        ctx.save_for_backward(derivative)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        derivative: Tensor = ctx.saved_tensors[0]
        return grad_output * derivative
