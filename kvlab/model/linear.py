"""A linear layer that decodes fast on CPU. M rows, K inputs, N outputs.

For a handful of rows a product takes the time of reading its weight once. In float32 torch's
own path there, MKL's gemv and gemm, is far from it: gemv runs on one thread, and a gemm of 2 to
16 rows takes twice gemv's time. oneDNN, which torch carries and its compiler uses, does not.
Measured for N = 50,257 and K = 768 on two cores: 10.9 against 4.6 ms for one row, 21.7 against
8.0 ms for eight, 24.0 against 10.7 ms for sixteen.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 16

_onednn = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # what torch.compile emits on CPU
    if torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's, untyped
    else None
)


class Linear(nn.Linear):
    """`torch.nn.Linear`, with oneDNN's product for few rows where no gradient is wanted."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., K) -> (..., N), as `torch.nn.functional.linear`."""
    if _onednn is None or not _suits(x):
        return F.linear(x, weight, bias)
    out: Tensor = _onednn(x, weight, bias, "none", [], "")
    return out


def _suits(x: Tensor) -> bool:
    few = x.numel() <= FEW_ROWS * x.shape[-1]
    plain = x.device.type == "cpu" and x.dtype == torch.float32
    other = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    return few and plain and not other
