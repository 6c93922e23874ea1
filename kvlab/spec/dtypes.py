"""The number formats by name: how many bytes each takes, and how the cache keeps it.

This is the one table of `serving.kv_dtype`. The YAML's choices and their messages, the byte
arithmetic of `kvlab.layout` and the buffers of `kvlab.cache.formats` all read it.
"""

from dataclasses import dataclass

SCALE_BYTES = 2
"""A scale is a float16."""

MODEL_DTYPE = "float32"
"""The dtype of a trial's parameters, and of its cache where ``kv_dtype`` is ``model``."""


@dataclass(frozen=True)
class DType:
    """One number format.

    Attributes:
        item_bytes: of one stored number.
        torch_name: the attribute of ``torch``; an older torch may lack it.
        kv_format: the class that stores K and V in it, as ``module:class``. It is named, not
            imported: specs and plans do not import torch.
        scale_bytes: of the scale that is stored with each token and head of K, and of V.
    """

    item_bytes: int
    torch_name: str
    kv_format: str = "kvlab.cache.formats:Dense"
    scale_bytes: int = 0

    @property
    def is_quantized(self) -> bool:
        return self.scale_bytes > 0

    def vector_bytes(self, size: int) -> int:
        """Return the bytes of one vector of ``size`` numbers, its scale included."""
        return size * self.item_bytes + self.scale_bytes


DTYPES: dict[str, DType] = {
    "float64": DType(8, "float64"),
    "float32": DType(4, "float32"),
    "float16": DType(2, "float16"),
    "bfloat16": DType(2, "bfloat16"),
    "int8": DType(1, "int8", "kvlab.cache.formats:Quantized", SCALE_BYTES),
    "fp8": DType(1, "float8_e4m3fn", "kvlab.cache.formats:Quantized", SCALE_BYTES),
}


def list_kv_dtypes() -> tuple[str, ...]:
    """Return the values of `serving.kv_dtype`; float64 serves exactness tests alone."""
    return ("model", *(name for name in DTYPES if name != "float64"))
