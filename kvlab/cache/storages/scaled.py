"""Numbers kept in eight bits with one float16 scale for each token and head.

Symmetric: the largest magnitude of a head's vector maps to the largest code. A scale for each
token and head follows KIVI (arXiv 2402.02750), whose finding is that values need it; keys
there do better with a scale for each channel, which a growing cache cannot fix in advance.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.cache.storage import Storage

_SMALLEST = 2.0**-24
"""The smallest float16 above zero: a vector of zeros keeps a usable scale."""


class Scaled(Storage):
    """Codes (B, H, S, D) of int8 or float8 and scales (B, H, S, 1) of float16."""

    def __init__(self, codes: Tensor, scales: Tensor, compute_dtype: torch.dtype):
        super().__init__(compute_dtype)
        self.codes, self.scales = codes, scales
        whole = not codes.dtype.is_floating_point
        self.largest = 127.0 if whole else float(torch.finfo(codes.dtype).max)

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> "Scaled":
        codes = torch.zeros(shape, dtype=dtype, device=device)
        scales = torch.zeros((*shape[:3], 1), dtype=torch.float16, device=device)
        return cls(codes, scales, compute_dtype)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self.codes, self.scales

    def encode(self, values: Tensor) -> Sequence[Tensor]:
        values = values.float()
        peak = values.abs().amax(-1, keepdim=True)
        scales = (peak / self.largest).clamp(_SMALLEST, 65504.0).half()
        codes = (values / scales.float()).clamp(-self.largest, self.largest)
        if not self.codes.dtype.is_floating_point:
            codes = codes.round()
        return codes.to(self.codes.dtype), scales

    def decode(self, kept: Sequence[Tensor]) -> Tensor:
        codes, scales = kept
        return codes.to(self.compute_dtype) * scales.to(self.compute_dtype)

    def like(self, tensors: Sequence[Tensor]) -> "Scaled":
        return Scaled(tensors[0], tensors[1], self.compute_dtype)
