"""Forward passes without a cache: whole texts, and a prefix with independent continuations.

Every token belongs to the pass. With `training.kv_dtype` K and V are read as a cache would give
them back. Training then computes what serving will: every K and V that a query reads has been
encoded and decoded once, by the format of the serving cache. Gradients pass straight through the
rounding, as if it were the identity (Bengio et al., arXiv 1308.3432; Jacob et al., arXiv
1712.05877).

Shapes: B rows, H heads of a part, C or T tokens, D width of a part, R rows that differ: 1, or B
with documents.
"""

import math
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kvlab.cache.attention_pass import AttentionPass, DocumentMask, KVContext
from kvlab.cache.formats import get_format
from kvlab.spec.dtypes import KVDtypes, KVStorage
from kvlab.spec.layer_config import LayerConfig
from kvlab.spec.model_config import ModelConfig

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
            self._current.pop(owner, None)  # a layer with a state writes nothing


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
        documents: DocumentMask | None,
        round_part: RoundPart | None = None,
    ):
        super().__init__(owners, round_part)
        self._documents = documents
        self.end = self.position_limit = length
        self.positions = (
            torch.arange(length, device=device) if documents is None else documents.positions
        )

    def read_kv(self, layer: int) -> KVContext:
        return KVContext(self._current.get(self._owners[layer], ()), documents=self._documents)


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


class KVReads(Protocol):
    """Whose K/V the layers of one pass read, if not those of their trained owners."""

    def for_compiler(self, device: torch.device) -> "KVReads":
        """Return the same for a compiled pass, which is not to be compiled for each."""

    def begin_pass(
        self,
        owners: Sequence[int],
        length: int,
        device: torch.device,
        documents: DocumentMask | None,
        round_part: RoundPart | None,
    ) -> OneShotPass:
        """Return a pass with these arguments of `OneShotPass`."""


def begin_one_shot_pass(
    config: ModelConfig,
    kv: KVStorage,
    length: int,
    device: torch.device,
    documents: DocumentMask | None = None,
    reads: KVReads | None = None,
) -> OneShotPass:
    """Return a pass over whole texts of ``length`` tokens that reads K and V as ``kv`` stores them.

    Args:
        device: of the positions.
        documents: the documents packed into the rows, if each is to be computed alone.
        reads: whose K/V the layers read; by default their owners'. Not with blocks.
    """
    if reads is not None:
        return reads.begin_pass(config.kv_owners, length, device, documents, make_rounding(kv))
    if kv.block_dtype is not None:
        begin = resolve_name(kv.block_dtype.one_shot_pass)
        return cast("OneShotPass", begin(config, kv, length, device, documents))
    return OneShotPass(config.kv_owners, length, device, documents, make_rounding(kv))


def make_rounding(kv: KVStorage) -> RoundPart | None:
    """Return how a part (B, H, T, D) comes back from storage; None if it is not rounded."""
    assert kv.block_dtype is None, "what is read of a token depends on the query"
    if kv.dtype == "model":
        return None
    assert not isinstance(kv.dtype, KVDtypes), "a training has one dtype for K and V"
    kv_format = get_format(kv.dtype, kv.group)
    return lambda part: round_straight_through(
        part, lambda values: kv_format.decode(kv_format.encode(values), values.dtype)
    )


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="a fused kernel may leave out a rounding to float16, and so give other codes"
)
def round_straight_through(values: Tensor, round_values: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``round_values(values)``, with the gradient of the identity.

    A compiled model calls it as it is, so that its codes are those of the cache.
    """
    rounded: Tensor = _StraightThrough.apply(values, round_values)  # type: ignore[no-untyped-call]
    return rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, round_values: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ARG004
        return round_values(values)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad_output, None
