"""Rotary position embedding (RoFormer, arXiv 2104.09864), applied at absolute positions.

Keys are rotated before they are cached. Pairs are (i, i + D/2) of a head, as in the Llama and
Mistral checkpoints. The article pairs neighbours (2i, 2i + 1), which is the same up to a fixed
permutation of a head's dimensions.

Shapes: B rows, H heads, C tokens, D head_dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.model.kernels import rotate_pairs


class RopeTable(NamedTuple):
    """cos and sin of the angles, (C, D/2), or (B, 1, C, D/2) where rows differ."""

    cos: Tensor
    sin: Tensor


def make_rope_table(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> RopeTable:
    """Return the rotations at ``positions`` (C,) or (B, C).

    Angles are computed in float64: at position 100,000 a float32 angle would already be off by a
    hundredth of a radian.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64)[..., None] * theta ** (-pairs / head_dim)
    if angles.dim() == 3:
        angles = angles[:, None]
    return RopeTable(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rope(x: Tensor, table: RopeTable | None) -> Tensor:
    """Rotate queries or keys x (B, H, C, D); return x itself without a table."""
    return x if table is None else rotate_pairs(x, table.cos, table.sin)
