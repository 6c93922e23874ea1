"""Forward passes without a cache: whole texts, and a prefix with independent continuations.

Every token belongs to the pass.

Shapes: B rows, H heads of a part, C or T tokens, D width of a part.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlab.cache.attention_pass import AttentionPass, DocumentMask, KVContext
from kvlab.spec.layer_config import LayerConfig

RoundPart = Callable[[Tensor], Tensor]
"""Takes a part (B, H, C, D) and returns it as storage gives it back."""


def make_additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask (R, 1, C, T) to be added to scores, from ``visible`` (R, C, T) of bool.

    From a mask of bool torch would make this tensor anew in every layer.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, -math.inf)[:, None]


class UncachedPass(AttentionPass):
    """What all passes without a cache share: consumers read the K/V of their trained owner.

    K/V are released after their last reader. Otherwise those of every layer would be in memory
    at once, and with them the queries, which are in the same tensor, the product of ``qkv``.
    Autograd keeps what the backward pass needs itself.

    Args:
        owners: the layer whose K/V each layer reads.
        round_part: K and V are read as it returns them; None: as they are.
    """

    def __init__(self, owners: Sequence[int], round_part: RoundPart | None = None):
        self._owners, self._round_part = owners, round_part
        self._last_readers = {owner: layer for layer, owner in enumerate(owners)}
        self._current: dict[int, tuple[Tensor, ...]] = {}

    def writes_kv(self, layer: int) -> bool:
        return self._owners[layer] == layer

    def write_kv(self, layer: int, *parts: Tensor) -> None:
        if self._round_part is not None:
            parts = tuple(map(self._round_part, parts))
        if self._last_readers[layer] != layer and not torch.is_grad_enabled():
            # later layers need no queries of this one
            parts = tuple(part.contiguous() for part in parts)
        self._current[layer] = parts

    def end_layer(self, layer: int) -> None:
        owner = self._owners[layer]
        if self._last_readers[owner] == layer:
            del self._current[owner]


class OneShotPass(UncachedPass):
    """A pass over whole texts: every token belongs to it.

    Args:
        owners: the layer whose K/V each layer reads.
        length: tokens C of each row.
        device: of the positions.
        documents: the documents packed into the rows, if each is to be computed alone.
        round_part: K and V are read as it returns them; None: as they are.
    """

    def __init__(
        self,
        owners: Sequence[int],
        length: int,
        device: torch.device,
        documents: DocumentMask | None = None,
        round_part: RoundPart | None = None,
    ):
        super().__init__(owners, round_part)
        self._documents = documents
        self.end = self.position_limit = length
        self.positions = (
            torch.arange(length, device=device) if documents is None else documents.positions
        )

    def read_kv(self, layer: int) -> KVContext:
        return KVContext(self._current[self._owners[layer]], documents=self._documents)


SHARED_PREFIX, PADDING = 0, -1


class TreePass(UncachedPass):
    """Tree attention: a token sees itself, the earlier tokens of its branch, and the prefix.

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
