# ruff: noqa: ARG001 (not every kernel is selected by all of its arguments)
"""Linear layers that train and decode fast on CPU, in float32.

Training uses oneDNN's matrix products, which torch includes for its compiler, for the outputs and
for the gradient of the inputs. For the gradient of the weight neither MKL nor oneDNN is always
faster, and MKL, which is used, is faster for small ones.

For a handful of rows a product takes as long as reading its weight once. torch's own path there,
MKL's gemv and gemm, is far from that bound: gemv runs on one thread, and a gemm of 2 to 16 rows
takes twice gemv's time. Two other paths come close to it:

- For one or two rows the transposed product: the weight times a (K, 2) matrix, one column of
  which may be a copy. MKL reads the weight at the memory's speed then, for K up to some 1,600.
- oneDNN. A call costs about ten microseconds more, which small products do not save.

Shapes: M rows, K inputs, N outputs.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kvlab.model.kernels.cpu_kernel import CPUKernel

TWO_COLUMN_MAX_INPUTS, TWO_COLUMN_MIN_WEIGHT = 1536, 2**15
"""The largest K and the smallest K N for the transposed product. A smaller weight stays in a core's
cache, and its call costs more than its numbers."""

ONEDNN_MIN_WEIGHT, ONEDNN_MIN_PRODUCT = 2**19, 2**23
"""K N (a weight larger than a core's cache) or M K N, from which oneDNN is faster."""

ONEDNN_MAX_INPUTS = 2**14
"""The largest K at which oneDNN is faster for many rows."""

_onednn = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # what torch.compile emits on CPU
    if torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's, untyped
    else None
)
_has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # torch's, untyped


def linear_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x (..., K) times weight (N, K) transposed, plus bias (N,): (..., N)."""
    is_row = x.device.type == "cuda" and x.numel() == x.shape[-1]
    if is_row and bias is not None and torch.compiler.is_compiling():
        return F.linear(x, weight) + bias  # the compiler reads weights fastest without a bias
    return F.linear(x, weight, bias)


def _select_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    outputs, inputs = weight.shape
    has_gradient, size = torch.is_grad_enabled(), outputs * inputs
    is_small = size < ONEDNN_MIN_WEIGHT and x.numel() * outputs < ONEDNN_MIN_PRODUCT
    if is_small and size < TWO_COLUMN_MIN_WEIGHT and not has_gradient:
        return None  # first, since a token of a small model takes as long as these questions
    if _onednn is None or not _is_cpu_float32(x):
        return None
    if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return None  # which choose the product themselves
    if has_gradient:
        needs_gradient = x.requires_grad or weight.requires_grad
        return _LinearFunction.apply if needs_gradient and weight.dtype == x.dtype else None
    if _has_mkl and x.numel() <= 2 * inputs and inputs <= TWO_COLUMN_MAX_INPUTS:
        return _two_column_linear
    return None if is_small else _onednn_linear


linear = CPUKernel("linear", linear_plain, _select_linear)
"""`linear_plain`; the fast implementation is differentiable once."""


class LinearProducts(Protocol):
    """Computes linear layers in training in place of `linear`; differentiable once."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x (..., K) times weight (N, K) transposed, plus bias (N,): (..., N)."""

    def describe(self, layers: int) -> dict[str, Any]:
        """Return, as plain data, what a training's record says of its products in ``layers``."""


class Linear(nn.Linear):
    """`torch.nn.Linear` by way of the kernel `linear`, or of `products`."""

    products: LinearProducts | None = None

    def forward(self, x: Tensor, rows: slice | None = None) -> Tensor:
        """Return the outputs (..., N) of x (..., K), or those in ``rows`` alone."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        if self.products is not None:
            return self.products(x, weight, bias)
        return linear(x, weight, bias)


def matmul_transposed_plain(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (M, K) times weight (N, K) transposed: (M, N)."""
    return x @ weight.T


def _select_matmul(x: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    if _onednn is None or not _is_cpu_float32(x) or x.shape[-1] > ONEDNN_MAX_INPUTS:
        return None
    return _onednn_linear


matmul_transposed = CPUKernel("matmul_transposed", matmul_transposed_plain, _select_matmul)
"""`matmul_transposed_plain` for many rows; the fast implementation is not differentiable."""


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
        return (
            _onednn_linear(rows, weight.T).view(x.shape) if needs_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = _onednn(x, weight, bias, "none", [], "")  # type: ignore[misc]
    return out


def _two_column_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    inputs, outputs = x.shape[-1], weight.shape[0]
    rows = x.numel() // inputs
    pair = x.reshape(rows, inputs).expand(2, inputs).contiguous()
    out = torch.mm(weight, pair.T).T[:rows].contiguous()
    if bias is not None:
        out += bias
    return out.reshape(*x.shape[:-1], outputs)


def _is_cpu_float32(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
