"""A linear layer that trains and decodes fast on CPU. M rows, K inputs, N outputs.

A training in float32 takes oneDNN's products, which torch carries for its compiler, for the
outputs and for the gradient of the inputs. Measured on one core, AMD Zen 4, in GFLOPs a second,
MKL and oneDNN at M = 1,024, K = 768, N = 3,072: outputs 91 and 103, gradient of the inputs 94
and 96; with K and N exchanged 89 and 100, 89 and 101. For the gradient of the weight neither is
always the faster of the two, and MKL is by far for small ones (K = 64, N = 192: 89 and 69).

For a handful of rows a product takes the time of reading its weight once. In float32 torch's
own path there, MKL's gemv and gemm, is far from it: gemv runs on one thread, and a gemm of 2 to
16 rows takes twice gemv's time. Two other paths are near it:

- For one or two rows the transposed product, the weight times a (K, 2) matrix, one column of
  which may be a copy. MKL reads the weight at the memory's speed then, for K up to some 1,600.
- oneDNN, which torch carries and its compiler uses.

Measured weight bytes read a second on one core that sums at 19 GB/s, by gemv or gemm, oneDNN and
two columns. K = 768, N = 2,304: one row 14, 18, 19 GB/s; two rows 8, 13, 19; eight rows 8, 10,
5. K = 3,072, N = 768: one row 19, 19, 11. At K = 256 two columns take 56% of oneDNN's time for
one row and half for two, at K = 1,600 as long and 68%, at K = 2,048 more.

A call of oneDNN costs some ten microseconds more, which small products do not win back. MKL's
time over oneDNN's on one core at 16, 64, 256 and 1,024 rows, warm: K = 64, N = 192: 0.41, 0.56,
0.90, 1.05; K = N = 256: 0.74, 0.94, 1.04, 1.11; K = 768, N = 2,304: 1.28, 1.22, 1.08, 1.06;
K = 768, N = 50,304: 1.79, 1.48, 1.20, 1.10.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

TWO_COLUMN_MAX_INPUTS = 1536
"""The largest K for the transposed product."""

ONEDNN_MIN_WEIGHT, ONEDNN_MIN_PRODUCT = 2**19, 2**23
"""K N, which no longer fits a core's cache, and M K N from which oneDNN is the faster."""

ONEDNN_MAX_INPUTS = 2**14
"""The largest K at which oneDNN is the faster for many rows. GFLOPs a second of MKL and oneDNN on
one core at M = 512: K = 2,304, N = 64: 73 and 99; K = 8,192, N = 384: 95 and 99; K = 50,304,
N = 768: 100 and 87."""

_onednn = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # what torch.compile emits on CPU
    if torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's, untyped
    else None
)
_has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # torch's, untyped


class Linear(nn.Linear):
    """`torch.nn.Linear`, with faster products on CPU in training and for few rows."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., K) -> (..., N), as `torch.nn.functional.linear`; on CPU differentiable once."""
    if _supports_training(x, weight):
        trained: Tensor = _LinearFunction.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return trained
    inputs = x.shape[-1]
    if torch.is_grad_enabled() or _onednn is None or not _is_cpu_float32(x) or _is_overridden():
        return F.linear(x, weight, bias)
    if _has_mkl and x.numel() <= 2 * inputs and inputs <= TWO_COLUMN_MAX_INPUTS:
        return _two_column_linear(x, weight, bias)
    if weight.numel() < ONEDNN_MIN_WEIGHT and x.numel() * len(weight) < ONEDNN_MIN_PRODUCT:
        return F.linear(x, weight, bias)
    return _onednn_linear(x, weight, bias)


def matmul_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """(M, K) by (N, K) -> (M, N), as ``x @ weight.T``, by the faster library for many rows. Not
    differentiable."""
    if _onednn is None or not _is_cpu_float32(x) or x.shape[-1] > ONEDNN_MAX_INPUTS:
        return x @ weight.T
    return _onednn_linear(x, weight, None)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows = outer.reshape(-1, outer.shape[-1]).contiguous()
        return (
            _onednn_linear(rows, weight.T, None).view(x.shape) if wants_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
        )


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = _onednn(x, weight, bias, "none", [], "")  # type: ignore[misc]
    return out


def _supports_training(x: Tensor, weight: Tensor) -> bool:
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    plain = _is_cpu_float32(x) and weight.dtype == x.dtype
    return wanted and plain and not _is_overridden() and _onednn is not None


def _is_cpu_float32(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0


def _is_overridden() -> bool:
    """Whether others choose the product: autocast by its dtype, the compiler by itself."""
    return torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()


def _two_column_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    inputs, outputs = x.shape[-1], weight.shape[0]
    rows = x.numel() // inputs
    pair = x.reshape(rows, inputs).expand(2, inputs).contiguous()
    out = torch.mm(weight, pair.T).T[:rows].contiguous()
    if bias is not None:
        out += bias
    return out.reshape(*x.shape[:-1], outputs)
