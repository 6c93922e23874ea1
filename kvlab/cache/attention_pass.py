"""One forward pass as the attention layers see it: what they read, and what they write.

Every layer does the same, with or without a cache:

    if attention_pass.writes_kv(layer):
        attention_pass.write_kv(layer, *parts)       # becomes what the slot holds of this pass
    attention_pass.observe_queries(layer, q)         # where a slot ranks tokens by them
    context = attention_pass.read_kv(layer)          # the slot's past tokens, then this pass's
    ...                                              # attend
    attention_pass.end_layer(layer)                  # after the slot's last reader: commit, release

So training, one-shot scoring and serving share one code path, and a consumer never writes. For
the tokens of this pass a layer reads the K/V of the last layer at or below it that wrote its
slot; for past tokens, what the slot has stored. Both tie rules follow: under ``overwrite`` every
layer with K/V projections writes, so it reads its own K/V in this pass and the last writer's for
past tokens; under ``owner`` only the first layer writes, and its K/V are read for all tokens.

A pass carries *parts*, the tensors that a token stores: its K and V, or one tensor that both are
views of. What K and V are to a layer is the model's matter.

A layer that folds its tokens into a state of fixed size (`kvlab.spec.mixers`) reads first. The
parts are the state after the past tokens, none where texts begin with the pass; if there are any,
it writes the state after this pass's tokens in their place.

Shapes: B rows, H heads of a part, C tokens of this pass, P past tokens, D width of a part.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.cache.formats import Stored


class DocumentMask:
    """The documents that are packed into the rows of one forward pass.

    None attends to another: each is computed as if it stood alone. Attention stays within the
    document, and positions start at 0, as those of a prompt do. Llama 3 (arXiv 2407.21783) masks in
    the same way; its positions are relative, so where they start makes no difference there.

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


@dataclass(frozen=True)
class KVContext:
    """What one layer reads.

    Attributes:
        parts: of every token, each (B, H, P + C, D). Where C is 1 they may be codes with scales.
        mask: (B or 1, 1, C, P + C), added to the scores, or of bool and true where a query sees
            a key; or None.
        is_causal: without a mask: if true, the keys are consecutive tokens that end with the last
            of this pass, so causality and the window apply; if false, every key is visible.
        documents: a causal query also sees no token of another document; P is 0.
        band: the window and the sink tokens of causal queries; None for those of the layer.
        counts: (B,) beside a mask of which each row sees its first keys: how many.
        is_real: (B, C) of bool beside a state: which tokens of this pass it takes in; None: all.
    """

    parts: tuple[Stored, ...]
    mask: Tensor | None = None
    is_causal: bool = True
    documents: DocumentMask | None = None
    counts: Tensor | None = None
    band: tuple[int | None, int] | None = None
    is_real: Tensor | None = None


def softmax_with_sink(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Return the softmax of scores (B, H, C, T) and the logit of a sink, without the sink's share.

    Args:
        sink: (H,) or (H, C); None for the softmax of the scores alone.
    """
    if sink is None:
        return scores.softmax(-1)
    batch, n_head, queries, _ = scores.shape
    column = sink.view(n_head, -1, 1).to(scores.dtype).expand(batch, n_head, queries, 1)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return torch.cat([scores, column], -1).softmax(-1, dtype=dtype)[..., :-1]


class AttentionPass(ABC):
    """The contract of one forward pass over C tokens of each of B rows.

    Attributes:
        positions: absolute positions of the tokens: (C,), or (B, C) where rows differ.
        end: tokens that the longest row holds after this pass.
        position_limit: a bound above all positions, those of padding too, known without asking
            the device.
    """

    positions: Tensor
    end: int
    position_limit: int

    @abstractmethod
    def writes_kv(self, layer: int) -> bool:
        """Whether the layer writes K/V of its own."""

    @abstractmethod
    def write_kv(self, layer: int, *parts: Tensor) -> None:
        """Make ``parts``, each (B, H, C, D), the K/V of the layer's slot for this pass's tokens."""

    def observe_queries(  # noqa: B027
        self, layer: int, queries: Tensor, sink: Tensor | None = None
    ) -> None:
        """Take the queries (B, H, C, D) of the layer, before it reads: slots may rank tokens.

        Args:
            sink: (H,) logits that join the denominators of the heads.
        """

    @abstractmethod
    def read_kv(self, layer: int) -> KVContext:
        """Return what the layer attends to."""

    def key_positions(self, layer: int) -> Tensor:  # noqa: ARG002
        """Return the positions of what `read_kv` returns: (P + C,), or (B, P + C)."""
        return self.positions

    @abstractmethod
    def end_layer(self, layer: int) -> None:
        """Mark the layer's attention as done: the K/V of this pass may have no reader left."""

    def finish(self) -> None:  # noqa: B027
        """Mark the pass as done: a cache advances by its tokens."""
