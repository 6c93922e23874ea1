"""Which keys the queries of a pass see, as one value that every attention backend takes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache import DocumentMask


@dataclass(frozen=True)
class CausalMask:
    """The keys that queries see of P + C consecutive ones, of which they are the last C.

    A query sees itself and the ``window - 1`` tokens before it, or all of them if ``window`` is
    None. Beside the window it sees the first ``sink_tokens`` of its text, which is then all there,
    or of its document (arXiv 2309.17453). It sees no token of another document.

    Attributes:
        window: tokens that a query sees, itself included.
        sink_tokens: without a window they are no others than it sees anyway.
        documents: of a pass without a past.
    """

    window: int | None = None
    sink_tokens: int = 0
    documents: DocumentMask | None = None

    def is_windowed(self, keys: int) -> bool:
        """Return whether a query of ``keys`` tokens may not see all those before it."""
        return self.window is not None and self.window < keys

    @property
    def has_scattered_sinks(self) -> bool:
        """Whether sinks are anywhere in a row: each of its documents has some."""
        return self.documents is not None and self.sink_tokens > 0

    def to_dense(self, queries: slice, device: torch.device) -> Tensor:
        """Return (C, T), or (B, 1, C, T), of bool: the tokens up to the last query that each sees.

        Args:
            queries: their positions; T is where they stop.
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
