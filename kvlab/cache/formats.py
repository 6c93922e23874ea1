"""Storage formats of the KV cache: how K and V are encoded in memory.

A format holds no state. It allocates the tensors of one K or V buffer, encodes values into them
and decodes them again. Attention always reads decoded values, also for the tokens of the current
pass, so results do not depend on how a text is split into chunks.

Shapes: B rows, H K/V heads, S entries of the buffer, D head_dim.
"""

from abc import ABC, abstractmethod
from pkgutil import resolve_name

import torch
from torch import Tensor

from kvlab.errors import CacheError
from kvlab.spec.dtypes import DTYPES

Shape = tuple[int, int, int, int]
"""(B, H, S, D)."""


class KVFormat(ABC):
    """Encode and decode values of shape (..., D)."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    @abstractmethod
    def allocate(self, shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
        """Return the zero-filled tensors of one buffer, each of leading shape (B, H, S)."""

    @abstractmethod
    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Encode ``values`` (..., D): one tensor for each that `allocate` returns."""

    @abstractmethod
    def decode(self, encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Decode to values (..., D) of ``dtype``, as near to the originals as the format allows."""


class Dense(KVFormat):
    """Values in a floating-point dtype: one tensor (B, H, S, D)."""

    def allocate(self, shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(shape, dtype=self.dtype, device=device),)

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values.to(self.dtype),)

    def decode(self, encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return encoded[0].to(dtype)


class Quantized(KVFormat):
    """Codes (B, H, S, D) of int8 or float8, and float16 scales (B, H, S, 1).

    Symmetric quantization with one scale for each token and head: the largest magnitude of a
    head's vector maps to the largest code. Scales for each token follow KIVI (arXiv 2402.02750),
    which finds that values need them. Keys do better there with a scale for each channel, which a
    growing cache cannot fix in advance.
    """

    MIN_SCALE, MAX_SCALE = 2.0**-24, 65504.0
    """The range of positive float16: a vector of zeros still has a usable scale."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(dtype)
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        self.max_code = float(info.max)

    def allocate(self, shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
        codes = torch.zeros(shape, dtype=self.dtype, device=device)
        scales = torch.zeros((*shape[:3], 1), dtype=torch.float16, device=device)
        return codes, scales

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        values = values.float()
        max_magnitude = values.abs().amax(-1, keepdim=True)
        scales = (max_magnitude / self.max_code).clamp(self.MIN_SCALE, self.MAX_SCALE).half()
        codes = (values / scales.float()).clamp(-self.max_code, self.max_code)
        if not self.dtype.is_floating_point:
            codes = codes.round()
        return codes.to(self.dtype), scales

    def decode(self, encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        codes, scales = encoded
        return codes.to(dtype) * scales.to(dtype)


def get_format(name: str) -> KVFormat:
    """Return the format of the dtype ``name``, an entry of `kvlab.spec.dtypes.DTYPES`.

    That table names this module's classes. To add a format, add a class here and an entry there.

    Raises:
        CacheError: this version of torch has no such dtype.
    """
    entry = DTYPES[name]
    dtype = getattr(torch, entry.torch_name, None)
    if dtype is None:
        usable = ", ".join(n for n, other in DTYPES.items() if hasattr(torch, other.torch_name))
        raise CacheError(f"kv_dtype = {name} is not in torch {torch.__version__}; use {usable}")
    kv_format: KVFormat = resolve_name(entry.kv_format)(dtype)
    return kv_format
