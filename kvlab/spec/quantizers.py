"""Quantizers of users' files: values of ``kv_dtype`` beside those of `kvlab.spec.dtypes.DTYPES`."""

from abc import ABC, abstractmethod
from typing import Any

from kvlab.spec.members import Member, is_count

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2,
    "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip
"""Bytes of a number of each dtype of torch that a cache can hold."""


def _are_codes(_quantizer: "Quantizer", stored: object) -> bool:
    """Return whether a cache can hold what `Quantizer.stored` has returned."""
    return (
        isinstance(stored, tuple)
        and len(stored) > 0
        and all(isinstance(one, tuple) and len(one) == 2 for one in stored)
        and all(is_count(count, 1) and dtype in ITEM_BYTES for count, dtype in stored)
    )


class Quantizer(Member, ABC):
    """How one vector of K or V is stored, such as a head's key, whatever is stored beside it."""

    returns = {
        "stored": (
            _are_codes,
            "a tuple of counts, whole numbers, each with the name of a dtype, as in "
            f"((8, 'uint8'), (1, 'float16')); dtypes are {', '.join(ITEM_BYTES)}",
        ),
        "find_problem": (
            lambda _quantizer, problem: problem is None or isinstance(problem, str),
            "None, or what is wrong, such as 'needs an even number'",
        ),
    }

    @property
    def checked_servings(self) -> tuple[dict[str, Any], ...]:
        return ({"kv_dtype": self},)

    @abstractmethod
    def stored(self, size: int) -> tuple[tuple[int, str], ...]:
        """Return what stores a vector of ``size`` numbers: tensors, each of so many numbers of a
        dtype of torch, by its name."""

    @abstractmethod
    def encode(self, values: Any) -> tuple[Any, ...]:
        """Encode ``values`` (..., size) of float32: a tensor (..., count) for each of `stored`.

        ``values`` may not be changed, nor what `decode` is given.
        """

    @abstractmethod
    def decode(self, *stored: Any) -> Any:
        """Return the vectors (..., size) that these tensors stand for."""

    def find_problem(self, size: int) -> str | None:  # noqa: ARG002
        """Return why vectors of ``size`` numbers cannot be stored; None if they can."""
        return None

    def vector_bytes(self, size: int) -> int:
        """Return the bytes of one vector."""
        return sum(count * ITEM_BYTES[dtype] for count, dtype in self.stored(size))
