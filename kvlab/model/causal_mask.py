"""Which keys the queries of a pass see, as one value that every attention backend takes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache import DocumentMask


@dataclass(frozen=True)
class CausalMask:
    """Which of P + C consecutive tokens the last C see.

    A query sees itself and the ``window - 1`` tokens before it, or all tokens before it if
    ``window`` is None. It also sees the first ``sink_tokens`` of its text or document
    (arXiv 2309.17453). It sees no token of another document.

    Attributes:
        window: tokens that a query sees, itself included.
        sink_tokens: with a window, the keys must begin with the first token of the text. Without
            one, a query sees all earlier tokens anyway.
        documents: the documents of a pass without past tokens.
    """

    window: int | None = None
    sink_tokens: int = 0
    documents: DocumentMask | None = None

    def is_windowed(self, keys: int) -> bool:
        """Return whether the window hides any of ``keys`` tokens from a query."""
        return self.window is not None and self.window < keys

    @property
    def has_scattered_sinks(self) -> bool:
        """Whether sinks may be anywhere in a row, since each document has its own."""
        return self.documents is not None and self.sink_tokens > 0

    def to_dense(self, queries: slice, device: torch.device) -> Tensor:
        """Return a mask of bool, (C, T) or (B, 1, C, T): which of the first T tokens queries see.

        Args:
            queries: the positions of the queries; T is their end.
        """
        keys = torch.arange(queries.stop, device=device)
        distance = torch.arange(queries.start, queries.stop, device=device)[:, None] - keys
        visible = distance >= 0
        if self.window is not None:
            is_near = distance < self.window
            if self.sink_tokens:
                first = keys
                if self.documents is not None:
                    first = self.documents.positions[:, None, None, : len(keys)]
                is_near = is_near | (first < self.sink_tokens)
            visible = visible & is_near
        if self.documents is not None:
            visible = visible & self.documents.same_document(queries, slice(0, len(keys)))
        return visible
