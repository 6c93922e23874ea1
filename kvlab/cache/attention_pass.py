"""One forward pass as the attention layers see it: whose K/V are read, and what is written.

Every layer does the same three things, whether or not there is a cache:

    if step.writes(layer):  step.put(layer, k, v)     # its K/V become its slot's current ones
    context = step.get(layer)                         # the slot's past tokens, then the current
    ... attend ...
    step.done(layer)                                  # after a slot's last reader: keep them

So training, one-shot scoring and serving are one code path, and a consumer never writes. A
layer that reads a slot gets the K/V of the *last writer at or below it* for the tokens of this
pass, and what the slot kept for the tokens before it. From that follow both tie rules:
``overwrite`` (all layers with projections write): own values in this pass, the last writer's
for the past. ``owner`` (only the first layer writes): the first layer's values, always.

Shapes: B rows, H K/V heads, C tokens of this pass, P past tokens, D head_dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache.document_mask import DocumentMask


@dataclass(frozen=True)
class KeysValues:
    """What one layer may read.

    Attributes:
        k, v: (B, H, P + C, D).
        mask: (B or 1, 1, C, P + C) of bool, true where a query sees a key; or None.
        ordered: without a mask: if true the keys are consecutive tokens that end with this
            pass's last, so causality and the window apply; if false all of them are visible.
        documents: then also none sees a token of another document; there are no past tokens.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    ordered: bool = True
    documents: DocumentMask | None = None


class AttentionPass(ABC):
    """The contract of one forward pass over C tokens of each of B rows."""

    @property
    @abstractmethod
    def positions(self) -> Tensor:
        """Absolute positions of the tokens: (C,), or (B, C) where rows differ."""

    @property
    @abstractmethod
    def end(self) -> int:
        """Tokens that the longest row holds after this pass."""

    @abstractmethod
    def writes(self, layer: int) -> bool:
        """Whether this layer computes K/V of its own."""

    @abstractmethod
    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Makes k and v (B, H, C, D) the current ones of the layer's slot."""

    @abstractmethod
    def get(self, layer: int) -> KeysValues:
        """What this layer reads."""

    def done(self, layer: int) -> None:  # noqa: B027  (most steps keep nothing)
        """Says that this layer has attended."""

    def finish(self) -> None:  # noqa: B027
        """Says that all layers have attended: the cache's length advances."""


class OneShotPass(AttentionPass):
    """No cache: the current tokens are all there is. Consumers read their trained owner.

    Args:
        documents: of the rows, if they are to be kept apart.
    """

    def __init__(
        self,
        owners: Sequence[int],
        length: int,
        device: torch.device,
        documents: DocumentMask | None = None,
    ):
        self._owners, self._length, self._documents = owners, length, documents
        self._positions = (
            torch.arange(length, device=device) if documents is None else documents.positions
        )
        self._current: dict[int, KeysValues] = {}

    @property
    def positions(self) -> Tensor:
        return self._positions

    @property
    def end(self) -> int:
        return self._length

    def writes(self, layer: int) -> bool:
        return self._owners[layer] == layer

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._current[layer] = KeysValues(k, v, documents=self._documents)

    def get(self, layer: int) -> KeysValues:
        return self._current[self._owners[layer]]
