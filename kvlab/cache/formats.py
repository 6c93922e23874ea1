"""The contract of a storage: how the numbers of one buffer (K or V of one slot) are kept.

Shapes: B rows, H K/V heads, S slots of the buffer, T tokens, D head_dim. What is attended to
is always what the storage gives back, so results do not depend on how a text is split into
chunks, however coarse the storage is.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from kvlab.errors import CacheError
from kvlab.spec.dtypes import DTYPES

Index = tuple[Any, ...]
"""An index into (B, H, S): slices, or tensors of rows and slots."""


class KVFormat(ABC):
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
    def like(self, tensors: Sequence[Tensor]) -> "KVFormat":
        """The same kind of storage over other tensors."""

    def write(self, index: Index, kept: Sequence[Tensor]) -> None:
        """Puts encoded values at ``index``."""
        for tensor, part in zip(self.tensors, kept, strict=True):
            tensor[index] = part

    def read(self, slots: slice) -> Tensor:
        """The values of some slots, (B, H, S', D)."""
        return self.decode([tensor[:, :, slots] for tensor in self.tensors])


# Numbers kept in a floating dtype of torch.


class Dense(KVFormat):
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
    ) -> "Dense":
        return cls(torch.zeros(shape, dtype=dtype, device=device), compute_dtype)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return (self.values,)

    def encode(self, values: Tensor) -> Sequence[Tensor]:
        return (values.to(self.values.dtype),)

    def decode(self, kept: Sequence[Tensor]) -> Tensor:
        return kept[0].to(self.compute_dtype)

    def like(self, tensors: Sequence[Tensor]) -> "Dense":
        return Dense(tensors[0], self.compute_dtype)


# Numbers kept in eight bits with one float16 scale for each token and head.
#
# Symmetric: the largest magnitude of a head's vector maps to the largest code. A scale for each
# token and head follows KIVI (arXiv 2402.02750), whose finding is that values need it; keys
# there do better with a scale for each channel, which a growing cache cannot fix in advance.


_SMALLEST_SCALE = 2.0**-24
"""The smallest float16 above zero: a vector of zeros keeps a usable scale."""


class Quantized(KVFormat):
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
    ) -> "Quantized":
        codes = torch.zeros(shape, dtype=dtype, device=device)
        scales = torch.zeros((*shape[:3], 1), dtype=torch.float16, device=device)
        return cls(codes, scales, compute_dtype)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self.codes, self.scales

    def encode(self, values: Tensor) -> Sequence[Tensor]:
        values = values.float()
        peak = values.abs().amax(-1, keepdim=True)
        scales = (peak / self.largest).clamp(_SMALLEST_SCALE, 65504.0).half()
        codes = (values / scales.float()).clamp(-self.largest, self.largest)
        if not self.codes.dtype.is_floating_point:
            codes = codes.round()
        return codes.to(self.codes.dtype), scales

    def decode(self, kept: Sequence[Tensor]) -> Tensor:
        codes, scales = kept
        return codes.to(self.compute_dtype) * scales.to(self.compute_dtype)

    def like(self, tensors: Sequence[Tensor]) -> "Quantized":
        return Quantized(tensors[0], tensors[1], self.compute_dtype)


def allocate_format(
    name: str, shape: tuple[int, int, int, int], compute_dtype: torch.dtype, device: torch.device
) -> KVFormat:
    """Return an empty format of ``shape`` (B, H, S, D).

    Args:
        name: of a dtype in `kvlab.spec.dtypes.DTYPES`, the table of this family.

    Raises:
        CacheError: this torch has no such dtype.
    """
    entry = DTYPES.get(name)
    dtype = getattr(torch, entry.torch_name, None) if entry else None
    if entry is None or dtype is None:
        usable = ", ".join(n for n, other in DTYPES.items() if hasattr(torch, other.torch_name))
        raise CacheError(f"kv_dtype = {name} is not in torch {torch.__version__}; use {usable}")
    kv_format: KVFormat = resolve_name(entry.kv_format).empty(shape, dtype, compute_dtype, device)
    return kv_format
