"""A pass without a cache whose layers read the K/V of drawn layers.

A pass that is not compiled reads the drawn layer's K/V as they are: it costs nothing. A compiled
one would be compiled anew for each draw. So its picks are a tensor, and it selects among all
choices, which reads more memory.

Every layer writes its K/V, also if none reads them. Their gradient is then zero, not missing: an
optimizer and several workers treat all parameters alike in every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.cache.attention_pass import DocumentMask, KVContext
from kvlab.cache.uncached_passes import OneShotPass, RoundPart
from kvlab.extensions.kv_routing.routing import Choices

Parts = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class KVRoutes:
    """Whose K/V every layer reads in one pass.

    Attributes:
        choices: see `kvlab.extensions.kv_routing.routing.Choices`.
        picks: an index into the choices of each layer; as a tensor (layers,) of int64 for a pass
            that is compiled once for all picks.
    """

    choices: Choices
    picks: Sequence[int] | Tensor

    def for_compiler(self, device: torch.device) -> "KVRoutes":
        """Return the same routes for a pass that is compiled once for all picks."""
        return KVRoutes(self.choices, torch.as_tensor(self.picks, device=device))

    def begin_pass(
        self,
        owners: Sequence[int],
        length: int,
        device: torch.device,
        documents: DocumentMask | None,
        round_part: RoundPart | None,
    ) -> OneShotPass:
        """Return a pass over whole texts in which layers read so."""
        return RoutedPass(self, owners, length, device, documents, round_part)


class RoutedPass(OneShotPass):
    """A pass over whole texts that reads K/V by ``routes``; see `OneShotPass`."""

    def __init__(
        self,
        routes: KVRoutes,
        owners: Sequence[int],
        length: int,
        device: torch.device,
        documents: DocumentMask | None,
        round_part: RoundPart | None,
    ):
        super().__init__(owners, length, device, documents, round_part)
        self._picks = routes.picks
        if isinstance(routes.picks, Tensor):
            self._sources = routes.choices
        else:
            pairs = zip(routes.choices, routes.picks, strict=True)
            self._sources = tuple((layers[pick],) for layers, pick in pairs)
        self._last_readers = {owner: owner for owner in owners}
        for layer, sources in enumerate(self._sources):
            self._last_readers |= dict.fromkeys(sources, layer)

    def read_kv(self, layer: int) -> KVContext:
        first, *others = (self._current.get(source, ()) for source in self._sources[layer])
        for number, parts in enumerate(others, 1):
            assert isinstance(self._picks, Tensor)
            is_picked = self._picks[layer] == number
            pairs = zip(parts, first, strict=True)
            first = tuple(torch.where(is_picked, own, other) for own, other in pairs)
        if self._last_readers.get(layer) == layer and layer not in self._sources[layer]:
            first = (_join_graph(first[0], self._current[layer]), *first[1:])
        return KVContext(first, documents=self._documents)

    def end_layer(self, layer: int) -> None:
        for owner in [one for one, last in self._last_readers.items() if last == layer]:
            self._current.pop(owner, None)


def _join_graph(values: Tensor, unread: Parts) -> Tensor:
    """Return ``values``, with a gradient of zero for ``unread``."""
    joined: Tensor = _JoinGraph.apply(values, *unread)  # type: ignore[no-untyped-call]
    return joined


class _JoinGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, *unread: Tensor) -> Tensor:
        ctx.like = [part.new_empty(()).expand(part.shape) for part in unread]
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        return grad_output, *map(torch.zeros_like, ctx.like)
