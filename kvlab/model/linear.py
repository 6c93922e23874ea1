"""A linear layer that decodes fast on CPU. M rows, K inputs, N outputs.

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
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 16
TWO_COLUMNS_INPUTS = 1536
"""The largest K for the transposed product."""

_onednn = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # what torch.compile emits on CPU
    if torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's, untyped
    else None
)
_has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # torch's, untyped


class Linear(nn.Linear):
    """`torch.nn.Linear`, with a faster product for few rows where no gradient is wanted."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., K) -> (..., N), as `torch.nn.functional.linear`."""
    if not _suits(x):
        return F.linear(x, weight, bias)
    inputs = x.shape[-1]
    if _has_mkl and x.numel() <= 2 * inputs and inputs <= TWO_COLUMNS_INPUTS:
        return _two_columns(x, weight, bias)
    if _onednn is None:
        return F.linear(x, weight, bias)
    out: Tensor = _onednn(x, weight, bias, "none", [], "")
    return out


def _suits(x: Tensor) -> bool:
    few = 0 < x.numel() <= FEW_ROWS * x.shape[-1]
    plain = x.device.type == "cpu" and x.dtype == torch.float32
    other = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    return few and plain and not other


def _two_columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    inputs, outputs = x.shape[-1], weight.shape[0]
    rows = x.numel() // inputs
    pair = x.reshape(rows, inputs).expand(2, inputs).contiguous()
    out = torch.mm(weight, pair.T).T[:rows].contiguous()
    if bias is not None:
        out += bias
    return out.reshape(*x.shape[:-1], outputs)
