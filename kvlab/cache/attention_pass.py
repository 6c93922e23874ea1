"""One forward pass as the attention layers see it: what they read, and what they write.

Every layer does the same, with or without a cache:

    if attention_pass.writes_kv(layer):
        attention_pass.write_kv(layer, *parts)       # becomes what the slot holds of this pass
    attention_pass.observe_queries(layer, q)         # where eviction ranks tokens by them
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

Shapes: B rows, H heads of a part, C tokens of this pass, P past tokens, D width of a part.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache.document_mask import DocumentMask
from kvlab.cache.formats import Stored

RoundPart = Callable[[Tensor], Tensor]
"""Takes a part (B, H, C, D) and returns it as storage gives it back."""


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
        counts: (B,) beside a mask of which each row sees its first keys: how many.
    """

    parts: tuple[Stored, ...]
    mask: Tensor | None = None
    is_causal: bool = True
    documents: DocumentMask | None = None
    counts: Tensor | None = None


def softmax_with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """Return the softmax of scores (B, H, C, T) and the logit of a sink, without the sink's share.

    Args:
        sink: (H,) or (H, C).
    """
    batch, n_head, queries, _ = scores.shape
    column = sink.view(n_head, -1, 1).to(scores.dtype).expand(batch, n_head, queries, 1)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return torch.cat([scores, column], -1).softmax(-1, dtype=dtype)[..., :-1]


def make_additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask (R, 1, C, T) to be added to scores, from ``visible`` (R, C, T) of bool.

    From a mask of bool torch would make this tensor anew in every layer.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, -math.inf)[:, None]


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
        """Take the queries (B, H, C, D) of the layer, before it reads: eviction ranks by them.

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
