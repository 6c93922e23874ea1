"""`serving.kv_rotate: hadamard`: Hadamard matrices (QuaRot, arXiv 2404.00456; llama.cpp#21038).

A few channels of keys are much larger than the others. The scale of a vector, or of a group of its
numbers, follows them, and the small numbers are rounded to few codes. Multiplied by a Hadamard
matrix, each number is a sum of all with signs, so none is much larger than the others.

A vector whose size is no power of two is rotated in blocks, each of the largest power of two that
divides it.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MIN_BLOCK = 4
"""Blocks of fewer numbers spread next to nothing."""


def find_block(size: int) -> int:
    """Return how many numbers of a vector of ``size`` are rotated together."""
    return size & -size


def find_size_problem(size: int, name: str) -> str | None:
    """Return why vectors of ``size`` numbers cannot be rotated, or None if they can.

    Args:
        name: of such a vector, such as ``head``.
    """
    if find_block(size) >= MIN_BLOCK:
        return None
    text = f"cannot rotate a {name} of {size} numbers: its blocks have {find_block(size)}, the"
    text = f"{text} largest power of two that divides it"
    return f"{text}; use a multiple of {MIN_BLOCK}, or leave it out"


@lru_cache
def make_matrix(size: int, device: Any) -> "Tensor":
    """Return the matrix (size, size) of float64, orthonormal and symmetric: it is its inverse.

    It has a block of Sylvester's matrix, divided by the root of its size, for each block of the
    vectors.
    """
    import torch

    block = find_block(size)
    # a tensor made in inference mode could not be used by a training
    with torch.inference_mode(False), torch.no_grad():
        matrix = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        while len(matrix) < block:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        blocks = torch.eye(size // block, dtype=torch.float64, device="cpu")
        return torch.kron(blocks, matrix * block**-0.5).to(device)
