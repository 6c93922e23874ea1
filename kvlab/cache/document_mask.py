"""Documents packed into one row, of which none sees another.

Each is computed as if it stood alone: attention stays within it, and its positions start at 0,
as those of a prompt do when the model serves. (Llama 3, arXiv 2407.21783, masks in the same way;
its positions are relative, so there it makes no difference where they start.)

B rows, C tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class DocumentMask:
    """Where documents lie in the rows of one forward pass.

    Attributes:
        ids: (B, C), a number for each of a row's documents, rising.
        positions: (B, C), of each token in its document; what a row begins with counts from 0
            even if its document began before.
    """

    def __init__(self, tokens: Tensor, start: int):
        """
        Args:
            tokens: (B, C).
            start: the token that begins a document, its first position.
        """
        begins = tokens == start
        index = torch.arange(tokens.shape[1], device=tokens.device)
        self.ids = begins.long().cumsum(1)
        self.positions = index - torch.where(begins, index, 0).cummax(1).values
        self._made: dict[Any, Any] = {}

    def together(self, queries: slice, keys: slice) -> Tensor:
        """(B, 1, Q, K) of bool: which of the row's tokens are of one document."""
        return (self.ids[:, queries, None] == self.ids[:, None, keys])[:, None]

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, made once for all layers of the pass."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]
