"""Rotary position embedding (RoFormer, arXiv 2104.09864), at absolute positions before caching.

Pairs are (i, i + D/2) of a head, as in the Llama and Mistral checkpoints; the article pairs
neighbours (2i, 2i + 1), which is the same up to a fixed permutation of a head's dimensions.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """cos and sin, (C, D/2), or (B, 1, C, D/2) where rows differ."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The rotation at ``positions`` (C,) or (B, C). Angles are taken in float64: at position
    100,000 float32 would already be off by a hundredth of a radian."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64)[..., None] * theta ** (-pairs / head_dim)
    if angles.dim() == 3:
        angles = angles[:, None]
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotates x (B, H, C, D), in the rotation's precision; without a rotation, x itself.

    The result is of x's dtype: under autocast Q and K would else be float32 beside a bfloat16 V.
    """
    if rotation is None:
        return x
    first, second = x.chunk(2, -1)
    cos, sin = rotation
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
