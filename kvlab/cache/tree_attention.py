"""Tree attention: a shared prefix with independent continuations, all in one row.

No cache: every token belongs to the pass, and a mask says what each of them sees.

Shapes: B rows, T tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.cache.attention_pass import KVContext, RoundPart, UncachedPass, make_additive_mask
from kvlab.spec.layer_config import LayerConfig

SHARED_PREFIX, PADDING = 0, -1


class TreePass(UncachedPass):
    """A token sees itself, the earlier tokens of its branch, and the shared prefix.

    Args:
        owners: the layer whose K/V each layer reads.
        layers: the window and the sink tokens of each layer.
        positions: (B, T), each token's position in the text from the prefix to its branch's end.
        branches: (B, T): `SHARED_PREFIX`, a branch 1, 2, ..., or `PADDING`, which no other
            token sees.
        dtype: of queries and keys.
        round_part: K and V are read as it returns them; None: as they are.
    """

    def __init__(
        self,
        owners: Sequence[int],
        layers: Sequence[LayerConfig],
        positions: Tensor,
        branches: Tensor,
        dtype: torch.dtype,
        round_part: RoundPart | None = None,
    ):
        super().__init__(owners, round_part)
        self._bands = [(layer.window, layer.sink_tokens) for layer in layers]
        self.positions = positions
        # a branch follows the prefix, so no position is beyond the row
        self.end = self.position_limit = positions.shape[1]
        distance = positions[:, :, None] - positions[:, None, :]
        same_branch = branches[:, :, None] == branches[:, None, :]
        is_prefix = (branches == SHARED_PREFIX)[:, None, :]
        visible = (same_branch | is_prefix) & (distance >= 0)
        self._masks = {}
        for window, sinks in set(self._bands):
            is_near = visible
            if window is not None:
                is_near = visible & ((distance < window) | (positions[:, None, :] < sinks))
            self._masks[window, sinks] = make_additive_mask(is_near, dtype)

    def read_kv(self, layer: int) -> KVContext:
        return KVContext(self._current[self._owners[layer]], self._masks[self._bands[layer]])
