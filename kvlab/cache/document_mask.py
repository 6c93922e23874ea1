"""Documents packed into one row, none of which attends to another.

Each is computed as if it stood alone: attention stays within the document, and positions start
at 0, as those of a prompt do. Llama 3 (arXiv 2407.21783) masks in the same way; its positions are
relative, so where they start makes no difference there.

Shapes: B rows, C tokens.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class DocumentMask:
    """The documents in the rows of one forward pass.

    Args:
        tokens: (B, C) of int64.
        start: the token that begins a document, its first position.

    Attributes:
        ids: (B, C), the number of each token's document in its row, rising.
        positions: (B, C), of each token in its document. The tokens that a row begins with count
            from 0 even if their document began before the row.
    """

    def __init__(self, tokens: Tensor, start: int):
        is_start = tokens == start
        index = torch.arange(tokens.shape[1], device=tokens.device)
        self.ids = is_start.long().cumsum(1)
        self.positions = index - torch.where(is_start, index, 0).cummax(1).values
        self._cache: dict[Hashable, Any] = {}

    def same_document(self, queries: slice, keys: slice) -> Tensor:
        """Return (B, 1, Q, K) of bool: whether query and key belong to one document."""
        return (self.ids[:, queries, None] == self.ids[:, None, keys])[:, None]

    def cached(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """Return ``build()``, called once for all layers of the pass."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]
