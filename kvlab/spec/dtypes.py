"""The number formats by name: how many bytes each takes, and how the cache keeps it.

This is the one table of `serving.kv_dtype`. The YAML's choices and their messages, the byte
arithmetic of `kvlab.layout` and the buffers of `kvlab.cache.formats` all read it.
"""

from dataclasses import dataclass

SCALE_BYTES = 2
"""A scale is a float16."""

DEFAULT_GROUP = 32
"""Numbers of a head that share a scale in a format of 4 bits."""

MIN_GROUP = 4
"""A group of fewer numbers is little more than its scale: it saves nothing, and rounds nothing."""

MODEL_DTYPE = "float32"
"""The dtype of a trial's parameters, and of its cache where ``kv_dtype`` is ``model``."""


@dataclass(frozen=True)
class DType:
    """One number format.

    Attributes:
        item_bytes: of one number, or of ``numbers_per_item`` that are packed together.
        torch_name: the attribute of ``torch``; an older torch may lack it.
        kv_format: the class that stores K and V in it, as ``module:class``. It is named, not
            imported: specs and plans do not import torch.
        scale_bytes: of a scale. Each group of a head's numbers has one, in K and in V.
        numbers_per_item: 2 where two codes are packed in a byte.
        default_group: numbers of a group where `serving.kv_group` does not say; None for a
            head's whole vector.
    """

    item_bytes: int
    torch_name: str
    kv_format: str = "kvlab.cache.formats:Dense"
    scale_bytes: int = 0
    numbers_per_item: int = 1
    default_group: int | None = None

    @property
    def is_quantized(self) -> bool:
        return self.scale_bytes > 0

    def group_size(self, size: int, group: int | None = None) -> int:
        """Return how many of a vector's ``size`` numbers share a scale.

        Args:
            group: `serving.kv_group`.
        """
        return min(group or self.default_group or size, size)

    def vector_bytes(self, size: int, group: int | None = None) -> int:
        """Return the bytes of one vector of ``size`` numbers, its scales included.

        Args:
            group: `serving.kv_group`.
        """
        scales = size // self.group_size(size, group)
        return size // self.numbers_per_item * self.item_bytes + scales * self.scale_bytes

    def find_size_problem(self, size: int, group: int | None = None) -> str | None:
        """Return why vectors of ``size`` numbers cannot be stored in it, or None if they can.

        Args:
            group: `serving.kv_group`.
        """
        if not self.is_quantized or (group is None and self.default_group is None):
            return None
        group = group or self.group_size(size)
        if size % group == 0 and group >= MIN_GROUP and size % self.numbers_per_item == 0:
            return None
        usable = [n for n in range(MIN_GROUP, size + 1) if size % n == 0]
        if not usable or size % self.numbers_per_item:
            return f"cannot store heads of {size} numbers; use an even head_dim from {MIN_GROUP} on"
        listed = ", ".join(map(str, usable[:-1]))
        listed = f"{listed} or {usable[-1]}" if listed else str(usable[-1])
        return f"needs groups that divide head_dim = {size}; use serving.kv_group: {listed}"


DTYPES: dict[str, DType] = {
    "float64": DType(8, "float64"),
    "float32": DType(4, "float32"),
    "float16": DType(2, "float16"),
    "bfloat16": DType(2, "bfloat16"),
    "int8": DType(1, "int8", "kvlab.cache.formats:Quantized", SCALE_BYTES),
    "fp8": DType(1, "float8_e4m3fn", "kvlab.cache.formats:Quantized", SCALE_BYTES),
    "int4": DType(
        1, "uint8", "kvlab.cache.formats:PackedInt4", SCALE_BYTES, 2, default_group=DEFAULT_GROUP
    ),
}


def list_kv_dtypes() -> tuple[str, ...]:
    """Return the values of `serving.kv_dtype`; float64 serves exactness tests alone."""
    return ("model", *(name for name in DTYPES if name != "float64"))
