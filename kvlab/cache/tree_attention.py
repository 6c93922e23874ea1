"""One forward pass over rows that branch: a trunk, and continuations that see it but not each
other. No cache: all tokens of a pass are current, and what each sees is a mask.

B rows, T tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.cache.attention_pass import AttentionPass, KeysValues

SHARED_PREFIX, PADDING = 0, -1


class TreePass(AttentionPass):
    """A token sees itself, the earlier tokens of its branch, and the trunk.

    Args:
        owners: the layer whose K/V each layer reads.
        windows: tokens that each layer's queries see, themselves included; None for all.
        positions: (B, T), of each token on its own path from the trunk's start.
        branches: (B, T): `TRUNK`, 1, 2, ..., or `PADDING`, which nothing else sees.
        dtype: of queries and keys.
    """

    def __init__(
        self,
        owners: Sequence[int],
        windows: Sequence[int | None],
        positions: Tensor,
        branches: Tensor,
        dtype: torch.dtype,
    ):
        self._owners, self._windows, self._positions = owners, windows, positions
        self._current: dict[int, tuple[Tensor, Tensor]] = {}
        distance = positions[:, :, None] - positions[:, None, :]
        mine = branches[:, :, None] == branches[:, None, :]
        seen = (mine | (branches == SHARED_PREFIX)[:, None, :]) & (distance >= 0)
        self._masks = {
            window: _additive_mask(seen if window is None else seen & (distance < window), dtype)
            for window in set(windows)
        }

    @property
    def positions(self) -> Tensor:
        return self._positions

    @property
    def end(self) -> int:
        return int(self._positions.max()) + 1

    def writes(self, layer: int) -> bool:
        return self._owners[layer] == layer

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._current[layer] = k, v

    def get(self, layer: int) -> KeysValues:
        k, v = self._current[self._owners[layer]]
        return KeysValues(k, v, self._masks[self._windows[layer]])


def _additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, 1, T, T), added to scores: torch would make it anew from a mask of bool in each layer."""
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return bias.masked_fill_(~seen, -math.inf)[:, None]
