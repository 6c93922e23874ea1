"""The storages, by the name that `serving.kv_dtype` (or the model's dtype) gives."""

import torch

from kvlab.cache.storage import Storage
from kvlab.cache.storages.plain import Plain
from kvlab.cache.storages.scaled import Scaled
from kvlab.errors import CacheError

PLAIN = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
SCALED = {"int8": torch.int8, "fp8": getattr(torch, "float8_e4m3fn", None)}


def make_storage(
    kind: str, shape: tuple[int, int, int, int], compute_dtype: torch.dtype, device: torch.device
) -> Storage:
    """An empty storage of ``shape`` (B, H, S, D).

    Raises:
        CacheError: this torch has no such dtype.
    """
    if kind in PLAIN:
        return Plain.empty(shape, PLAIN[kind], compute_dtype, device)
    dtype = SCALED.get(kind)
    if dtype is None:
        known = ", ".join(PLAIN) + ", int8"
        raise CacheError(f"kv_dtype = {kind} is not in torch {torch.__version__}; use {known}")
    return Scaled.empty(shape, dtype, compute_dtype, device)


__all__ = ["make_storage"]
