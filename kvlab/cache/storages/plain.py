"""Numbers kept in a floating dtype of torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.cache.storage import Storage


class Plain(Storage):
    """One tensor (B, H, S, D), converted on the way in and out if the dtypes differ."""

    def __init__(self, values: Tensor, compute_dtype: torch.dtype):
        super().__init__(compute_dtype)
        self.values = values

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> "Plain":
        return cls(torch.zeros(shape, dtype=dtype, device=device), compute_dtype)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return (self.values,)

    def encode(self, values: Tensor) -> Sequence[Tensor]:
        return (values.to(self.values.dtype),)

    def decode(self, kept: Sequence[Tensor]) -> Tensor:
        return kept[0].to(self.compute_dtype)

    def like(self, tensors: Sequence[Tensor]) -> "Plain":
        return Plain(tensors[0], self.compute_dtype)
