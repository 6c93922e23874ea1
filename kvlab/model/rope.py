"""Rotary position embedding (RoFormer, arXiv 2104.09864), applied at absolute positions.

Keys are rotated before they are cached, except where they are the values, too. Pairs are
(i, i + D/2) of a head, as in the Llama and Mistral checkpoints. The article pairs neighbours
(2i, 2i + 1), which is the same up to a fixed permutation of a head's dimensions.

Shapes: B rows, H heads, C tokens, D head_dim.
"""

import math
from collections import deque
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.model.kernels.rotate_pairs import rotate_pairs
from kvlab.spec.layer_config import RopeScaling


class RopeTable(NamedTuple):
    """cos and sin of the angles of R rotated dimensions, (C, R/2), or (B, 1, C, R/2) where rows
    differ."""

    cos: Tensor
    sin: Tensor


def make_rope_table(
    positions: Tensor,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
) -> RopeTable:
    """Return the rotations of ``rotary_dim`` dimensions at ``positions`` (C,) or (B, C).

    Angles are computed in float64: at position 100,000 a float32 angle would already be off by a
    hundredth of a radian.
    """
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device)
    frequencies, length = theta ** (-pairs / rotary_dim), 1.0
    if scaling is not None:
        frequencies = _scale_frequencies(frequencies, rotary_dim, theta, scaling)
        length = 0.1 * math.log(scaling.factor) + 1 if scaling.by == "yarn" else 1.0
    angles = positions.to(torch.float64)[..., None] * frequencies
    if angles.dim() == 3:
        angles = angles[:, None]
    return RopeTable((length * angles.cos()).to(dtype), (length * angles.sin()).to(dtype))


def _scale_frequencies(
    frequencies: Tensor, rotary_dim: int, theta: float, scaling: RopeScaling
) -> Tensor:
    """Return the frequencies (R/2,) for a longer context.

    YaRN (arXiv 2309.00071, section 3.2) does so by how often a pair turns in the original one.
    """
    if scaling.by == "linear":
        return frequencies / scaling.factor
    assert scaling.original is not None, "yarn has an original context"
    first, last = (
        rotary_dim * math.log(scaling.original / (2 * math.pi * turns)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    last = first + 0.001 if last == first else last  # as published: a step instead of a ramp
    pairs = torch.arange(len(frequencies), dtype=torch.float64, device=frequencies.device)
    scaled = ((pairs - first) / (last - first)).clamp(0, 1)
    return torch.lerp(frequencies, frequencies / scaling.factor, scaled)


class RotaryTables:
    """The rotations at positions 0, 1, ... of some layers, computed once for a device and dtype.

    A compiled graph would compute them again, in float64, in every kernel that reads them, forward
    and backward. They are not buffers of the module: a checkpoint would then contain them, and
    ``module.to(dtype)`` would round them a second time.
    """

    def __init__(self, rotary_dim: int, theta: float, scaling: RopeScaling | None = None):
        self._rotary_dim, self._theta, self._scaling = rotary_dim, theta, scaling
        self._table: RopeTable | None = None

    def prepare(self, length: int, device: torch.device, dtype: torch.dtype) -> RopeTable:
        """Return the table (at least ``length``, R/2), made now if it is missing or too short.

        Call it before a compiled or captured pass of up to ``length`` tokens. A captured pass has
        to keep what is returned: a longer table takes its place here.
        """
        table = self._table
        if (
            table is None
            or table.cos.shape[0] < length
            or table.cos.device != device
            or table.cos.dtype != dtype
        ):
            size = 1 << max(0, length - 1).bit_length()  # a text that grows makes few tables
            # a tensor made in inference mode could not be used by a training
            with torch.inference_mode(False), torch.no_grad():
                positions = torch.arange(size, device="cpu")
                parts = make_rope_table(
                    positions, self._rotary_dim, self._theta, dtype, self._scaling
                )
                table = self._table = RopeTable(*(part.to(device) for part in parts))
        return table

    def at(self, positions: Tensor, limit: int, dtype: torch.dtype) -> RopeTable:
        """Return the rotations at ``positions`` (C,) or (B, C), all below ``limit``."""
        table = self.prepare(limit, positions.device, dtype)
        cos, sin = (part[positions] for part in table)
        return (
            RopeTable(cos, sin) if positions.dim() == 1 else RopeTable(cos[:, None], sin[:, None])
        )


KEY_TABLES = 4
"""Tables that a pass keeps for keys: those of global layers, and of rings of a few sizes."""


class PassRotation:
    """The rotations of one pass by one kind of layer.

    Attributes:
        table: of the tokens of this pass.
    """

    def __init__(self, tables: RotaryTables, positions: Tensor, limit: int, dtype: torch.dtype):
        self._tables, self._positions = tables, positions
        self._limit, self._dtype = limit, dtype
        self.table = tables.at(positions, limit, dtype)
        self._tables_of_keys: deque[tuple[Tensor, RopeTable]] = deque(maxlen=KEY_TABLES)

    @cached_property
    def inverse(self) -> RopeTable:
        """The rotations back, also of what a scaling by yarn has made longer."""
        cos, sin = self.table
        squared = cos.square() + sin.square()
        return RopeTable(cos / squared, -sin / squared)

    def at(self, positions: Tensor) -> RopeTable:
        """Return the rotations at the positions of the keys that are read, for any number of keys.

        A negative position marks an empty entry, which no query sees. Layers that pass the same
        tensor of positions get the same table.
        """
        if positions is self._positions:
            return self.table
        for known, table in self._tables_of_keys:
            if known is positions:
                return table
        table = self._tables.at(positions.clamp_min(0), self._limit, self._dtype)
        self._tables_of_keys.append((positions, table))
        return table


def apply_rope(x: Tensor, table: RopeTable | None) -> Tensor:
    """Rotate queries or keys x (B, H, C, D); return x itself without a table.

    A table of fewer than D dimensions rotates the leading ones, as GPT-NeoX (arXiv 2204.06745).
    """
    if table is None:
        return x
    rotary_dim = 2 * table.cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return rotate_pairs(x, table.cos, table.sin)
    rotated = rotate_pairs(x[..., :rotary_dim], table.cos, table.sin)
    return torch.cat([rotated, x[..., rotary_dim:]], -1)
