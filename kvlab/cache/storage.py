"""The contract of a storage: how the numbers of one buffer (K or V of one slot) are kept.

Shapes: B rows, H K/V heads, S slots of the buffer, T tokens, D head_dim. What is attended to
is always what the storage gives back, so results do not depend on how a text is split into
chunks, however coarse the storage is.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Index = tuple[Any, ...]
"""An index into (B, H, S): slices, or tensors of rows and slots."""


class Storage(ABC):
    """Numbers of shape (B, H, S, D), kept in some form and given back in ``compute_dtype``."""

    def __init__(self, compute_dtype: torch.dtype):
        self.compute_dtype = compute_dtype

    @abstractmethod
    def encode(self, values: Tensor) -> Sequence[Tensor]:
        """``values`` (..., D) in the form kept: one tensor for each of `tensors`."""

    @abstractmethod
    def decode(self, kept: Sequence[Tensor]) -> Tensor:
        """The inverse of `encode`, as near as the form allows, in ``compute_dtype``."""

    @property
    @abstractmethod
    def tensors(self) -> Sequence[Tensor]:
        """What is kept: tensors of leading shape (B, H, S)."""

    @abstractmethod
    def like(self, tensors: Sequence[Tensor]) -> "Storage":
        """The same kind of storage over other tensors."""

    def write(self, index: Index, kept: Sequence[Tensor]) -> None:
        """Puts encoded values at ``index``."""
        for tensor, part in zip(self.tensors, kept, strict=True):
            tensor[index] = part

    def read(self, slots: slice) -> Tensor:
        """The values of some slots, (B, H, S', D)."""
        return self.decode([tensor[:, :, slots] for tensor in self.tensors])
