"""Products of linear layers in int8: dynamic scales, one a row of the left factor and one a column
of the right.

A linear layer has three products. With M rows, K inputs and N outputs they are

- ``output``: x (M, K) times the weight (N, K) transposed;
- ``grad_input``: the output's gradient (M, N) times the weight;
- ``grad_weight``: the output's gradient transposed times x.

Each can be in int8 by itself. Then every row of its left factor and every column of its right
factor is divided by a scale, its largest magnitude over 127, and rounded to the nearest integer.
The integers are multiplied and added in int32, exactly, and each sum is multiplied by its two
scales in float32. All three are the scheme of torchao's int8 mixed-precision training. ``output``
and ``grad_input`` are that of SwitchBack (arXiv 2304.13013), which has one scale for the whole
weight. Weights, sums over steps and the optimizer stay in float32.

``grad_weight`` adds over the tokens of a pass, so its scales are those of a microbatch on one
worker. The other two do not depend on which rows share a pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlab.extensions.int8_training.config import INT8_PRODUCTS, Int8Fields
from kvlab.model.kernels.cpu_kernel import is_plain_code_used
from kvlab.model.kernels.linear import matmul_transposed
from kvlab.spec.training_config import TrainingConfig

LARGEST_CODE = 127

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The scale of zeros, whose codes are zero."""

_EXACT_FLOAT32_INPUTS = 2**24 // LARGEST_CODE**2
"""Products of codes whose float32 sum is exact: it stays below 2^24 in any order."""

_EXACT_INT32_INPUTS = (2**31 - 1) // LARGEST_CODE**2
"""Products of codes whose int32 sum cannot overflow. Sums of more are added in float32."""

_CHUNK_ELEMENTS = 2**17
"""Elements whose intermediate results stay in a core's cache."""

_MIN_CHUNK_ROWS = 256
"""Rows of one call of a product; each call arranges the right factor anew."""


class Codes(NamedTuple):
    """A matrix as ``codes * scales``.

    Attributes:
        codes: of int8, from -127 to 127.
        scales: of float32, (M, 1) or (1, N).
    """

    codes: Tensor
    scales: Tensor

    @property
    def mT(self) -> "Codes":
        return Codes(self.codes.mT, self.scales.mT)


def quantize(x: Tensor, dim: int) -> Codes:
    """Return x (M, N) as codes with one scale for all values along ``dim``.

    Codes are rounded to the nearest integer, halves to the even one. NaN and infinity make their
    scale NaN or infinite.
    """
    parts = list(_iter_rows(x))
    largest = torch.cat([part.abs().amax(dim, keepdim=True) for part in parts])
    if dim == 0:
        largest = largest.amax(0, keepdim=True)
    scales = (largest.float() / LARGEST_CODE).clamp_min(_SMALLEST_SCALE)
    if len(parts) == 1:
        return Codes((x / scales).round_().to(torch.int8), scales)
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    row_scales = _iter_rows(scales, len(parts[0])) if dim == 1 else [scales] * len(parts)
    for part, own, target in zip(parts, row_scales, _iter_rows(codes), strict=True):
        target.copy_((part / own).round_())
    return Codes(codes, scales)


def _iter_rows(x: Tensor, rows: int | None = None) -> Iterator[Tensor]:
    """Yield the rows of x (M, N) in parts, on CPU of a size for a core's cache."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return iter((x,))
    return iter(torch.split(x, rows or max(1, _CHUNK_ELEMENTS // x.shape[1])))


def multiply_integers(a: Tensor, b: Tensor) -> Tensor:
    """Return the int32 product of codes a (M, K) and b (K, N): what the kernels compute."""
    return a.int() @ b.int()


def _multiply_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply codes in float32, so few of them at a time that every sum is exact."""
    pairs = _split_inputs(a, b, _EXACT_FLOAT32_INPUTS)
    with torch.autocast(a.device.type, enabled=False):  # which would round the sums
        first, *others = ((left.float() @ right.float()).int() for left, right in pairs)
    return sum(others, first)


def _split_inputs(a: Tensor, b: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return parts of a (M, K) and b (K, N) of at most ``count`` inputs, whose products add up."""
    return zip(torch.split(a, count, 1), torch.split(b, count, 0), strict=True)


INT8_KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "onednn": torch._int_mm,
    "float32": _multiply_in_float32,
    "integer": multiply_integers,
}
"""Kernel -> the int32 product of codes (M, K) and (K, N); all are equal bit for bit."""


def select_int8_kernel(device: torch.device) -> str:
    """Return the fastest of `INT8_KERNELS` that is exact on a device.

    oneDNN is exact on processors with VNNI or AMX. Without them it adds pairs of products in 16
    bits, where they saturate, so an extreme product is tried. On CUDA, where products of these
    widths gain nothing by int8, float32 gives its numerics: TF32 represents every code.
    """
    if is_plain_code_used() or device.type not in ("cpu", "cuda"):
        return "integer"
    return "onednn" if device.type == "cpu" and _is_onednn_exact() else "float32"


@lru_cache
def _is_onednn_exact() -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    a, b = (torch.full(shape, LARGEST_CODE, dtype=torch.int8) for shape in ((33, 64), (64, 33)))
    expected = 64 * LARGEST_CODE**2
    return all(
        bool((torch._int_mm(left, right) == sign * expected).all())
        for left, right, sign in ((a, b, 1), (-a, -b, 1), (a, -b, -1), (-a, b, -1))
    )


def multiply(
    a: Codes, b: Codes, kernel: str, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the product of a (M, K) and b (K, N), plus ``bias`` (N,): (M, N) of ``dtype``."""
    columns = b.codes.shape[1]
    rows = max(_MIN_CHUNK_ROWS, _CHUNK_ELEMENTS // columns)
    if a.codes.device.type != "cpu" or torch.compiler.is_compiling() or len(a.codes) <= rows:
        return _multiply_rows(a, b, kernel, bias).to(dtype)
    out = torch.empty(len(a.codes), columns, dtype=dtype, device=a.codes.device)
    for start in range(0, len(a.codes), rows):
        part = slice(start, start + rows)
        out[part] = _multiply_rows(Codes(a.codes[part], a.scales[part]), b, kernel, bias)
    return out


def _multiply_rows(a: Codes, b: Codes, kernel: str, bias: Tensor | None) -> Tensor:
    first, *others = (
        INT8_KERNELS[kernel](*pair).float()
        for pair in _split_inputs(a.codes, b.codes, _EXACT_INT32_INPUTS)
    )
    scaled = sum(others, first) * a.scales
    return scaled * b.scales if bias is None else torch.addcmul(bias.float(), scaled, b.scales)


@dataclass(frozen=True)
class Int8Linear:
    """Which products of a linear layer are in int8, and by which kernel.

    Attributes:
        products: those of `INT8_PRODUCTS` that are in int8.
        kernel: of `INT8_KERNELS`.
    """

    products: tuple[str, ...]
    kernel: str

    def describe(self, layers: int) -> dict[str, Any]:
        """Return, as plain data, what a training's record says of its products."""
        return {"kernel": self.kernel, "products": list(self.products), "layers": layers}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x (..., K) times weight (N, K) transposed, plus bias (N,): (..., N).

        Differentiable once. Under autocast the result and the products that are not in int8 have
        its dtype.
        """
        device = x.device.type
        is_reduced = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_reduced else x.dtype
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        out: Tensor = _Int8LinearFunction.apply(  # type: ignore[no-untyped-call]
            rows, weight, bias, *(one in self.products for one in INT8_PRODUCTS), self.kernel
        )
        return out.view(*x.shape[:-1], len(weight))


class _Int8LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        output: bool,
        grad_input: bool,
        grad_weight: bool,
        kernel: str,
    ) -> Tensor:
        ctx.grad_input, ctx.grad_weight, ctx.kernel = grad_input, grad_weight, kernel
        ctx.weight_dtype = weight.dtype
        # the gradient of the weight then needs the codes of x alone
        saved = quantize(x, 0) if grad_weight and weight.requires_grad else (x, None)
        ctx.save_for_backward(*saved, weight)
        if output:
            return multiply(quantize(x, 1), quantize(weight, 1).mT, kernel, bias, x.dtype)
        product = _multiply_floats(x, weight.to(x.dtype))
        return product if bias is None else product + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scales, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        to_input = to_weight = None
        if needs_input:
            if ctx.grad_input:
                left, right = quantize(grad_output, 1), quantize(weight, 0)
                to_input = multiply(left, right, ctx.kernel, dtype=grad_output.dtype)
            else:
                to_input = _multiply_floats(grad_output, weight.to(grad_output.dtype).mT)
        if needs_weight and ctx.grad_weight:
            left = quantize(grad_output, 0).mT
            to_weight = multiply(left, Codes(x, x_scales), ctx.kernel, dtype=ctx.weight_dtype)
        elif needs_weight:
            to_weight = (grad_output.mT @ x).to(ctx.weight_dtype)
        to_bias = grad_output.sum(0, dtype=ctx.weight_dtype) if needs_bias else None
        return to_input, to_weight, to_bias, *[None] * 4


def _multiply_floats(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (M, K) times weight (N, K) transposed."""
    return x @ weight.mT if torch.compiler.is_compiling() else matmul_transposed(x, weight)


def make_products(training: TrainingConfig, device: torch.device) -> Int8Linear | None:
    """Return what computes the linear layers of a training; None if all products are in float."""
    products = Int8Fields.of(training).int8
    return Int8Linear(products, select_int8_kernel(device)) if products else None
