"""Forward passes without a cache: whole texts, and a prefix with independent continuations.

Every token belongs to the pass. With `training.kv_dtype` K and V are read as a cache would give
them back. Training then computes what serving will: every K and V that a query reads has been
encoded and decoded once, by the format of the serving cache. Gradients pass straight through the
rounding, as if it were the identity (Bengio et al., arXiv 1308.3432; Jacob et al., arXiv
1712.05877).

In most formats a token is stored alike at all times, so it is rounded where it is written. KIVI
(`kvlab.cache.kivi`) keeps the newest tokens in full precision, so what a query reads of a token
depends on the query's position. With L(q) the tokens that are quantized when q is decoded, the
query at position q reads the rounded keys before L(q) and the exact ones from L(q) to q. Both
copies are among the keys of one pass, n + L(n) for n tokens, and a mask gives each query one copy
of each token. A block's codes depend on its tokens alone, so they are those of the cache.

Shapes: B rows, H heads of a part, C or T tokens, K keys, N blocks, G tokens of a block, D width of
a part, R rows that differ: 1, or B with documents.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kvlab.cache.attention_pass import AttentionPass, DocumentMask, KVContext
from kvlab.cache.formats import get_format
from kvlab.cache.kivi import BlockFormat
from kvlab.cache.kv_buffer import concatenate_parts
from kvlab.spec.dtypes import DTYPES, BlockRule, KVStorage
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
    if kv.blocks is not None:
        return _BlockwisePass(config, kv, kv.blocks, length, device, documents)
    return OneShotPass(config.kv_owners, length, device, documents, make_rounding(kv))


def make_rounding(kv: KVStorage) -> RoundPart | None:
    """Return how a part (B, H, T, D) comes back from storage; None if it is not rounded."""
    assert kv.blocks is None, "what is read of a token depends on the query"
    if kv.dtype == "model":
        return None
    assert isinstance(kv.dtype, str), "a training has one dtype for K and V"
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


class _BlockwisePass(OneShotPass):
    """A pass whose queries read each token as KIVI's cache holds it at the query's own time."""

    def __init__(
        self,
        config: ModelConfig,
        kv: KVStorage,
        rule: BlockRule,
        length: int,
        device: torch.device,
        documents: DocumentMask | None,
    ):
        super().__init__(config.kv_owners, length, device, documents)
        self._windows = [layer.window for layer in config.layers]
        self._rule, self._blocks = rule, _Blocks.find(rule, length, device, documents)
        assert isinstance(kv.dtype, str), "a training has one dtype for K and V"
        per_byte = DTYPES[kv.dtype].numbers_per_item
        self._formats = BlockFormat(per_byte, None), BlockFormat(per_byte, rule.group)
        self._rounded: dict[int, tuple[Tensor, ...]] = {}
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def write_kv(self, layer: int, *parts: Tensor) -> None:
        super().write_kv(layer, *parts)
        if self._blocks.positions.numel() and self._rule.quantizes(self._windows[layer]):
            self._rounded[layer] = tuple(
                round_straight_through(self._blocks.take(part), partial(self._round, block_format))
                for part, block_format in zip(parts, self._formats, strict=True)
            )

    def read_kv(self, layer: int) -> KVContext:
        owner = self._owners[layer]
        if owner not in self._rounded:
            return super().read_kv(layer)
        parts = concatenate_parts(self._rounded[owner], self._current[owner])
        key = self._windows[layer], parts[0].dtype
        if key not in self._masks:
            self._masks[key] = make_additive_mask(self._find_visible(key[0]), key[1])
        return KVContext(parts, self._masks[key])

    def end_layer(self, layer: int) -> None:
        super().end_layer(layer)
        if self._owners[layer] not in self._current:
            self._rounded.pop(self._owners[layer], None)

    def _round(self, block_format: BlockFormat, tokens: Tensor) -> Tensor:
        rows, heads, _, width = tokens.shape
        blocks = tokens.reshape(rows, heads, -1, self._rule.group, width)
        return block_format.decode(block_format.encode(blocks), tokens.dtype).flatten(2, 3)

    def _find_visible(self, window: int | None) -> Tensor:
        """Return (R, T, K) of bool: which tokens queries see, first of the blocks, then of all."""
        own = self.positions.view(-1, self.end)
        keys = torch.cat([self._blocks.positions, own], 1)[:, None]
        is_rounded = (
            torch.arange(keys.shape[2], device=own.device) < self._blocks.positions.shape[1]
        )
        queries = own[:, :, None]
        group, residual = self._rule.group, self._rule.residual
        limit = (queries + 1 - residual).clamp_min(0) // group * group
        visible = torch.where(is_rounded, keys < limit, (keys >= limit) & (keys <= queries))
        if window is not None:
            visible &= queries - keys < window
        if self._documents is not None:
            ids = self._documents.ids
            visible &= ids[:, :, None] == torch.cat([self._blocks.documents, ids], 1)[:, None]
        return visible


@dataclass(frozen=True)
class _Blocks:
    """Which tokens of a pass are quantized together.

    Attributes:
        positions: (R, N x G) of their tokens, in their document.
        documents: (R, N x G) the numbers of these, -1 of a block that the row does not have.
        index: (R, N x G) where they are in the pass; None: they are its first.
    """

    positions: Tensor
    documents: Tensor
    index: Tensor | None = None

    @classmethod
    def find(
        cls, rule: BlockRule, length: int, device: torch.device, documents: DocumentMask | None
    ) -> "_Blocks":
        """Return the blocks of rows of ``length`` tokens: those of each document alone.

        With documents there are places for as many blocks as a row of one document fills, so that
        shapes do not depend on the text.
        """
        group = rule.group
        if documents is None:
            tokens = torch.arange(rule.quantized_tokens(length), device=device)[None]
            return cls(tokens, torch.zeros_like(tokens))
        ids, positions = documents.ids, documents.positions
        count = length // group
        if not count:
            return cls(positions[:, :0], ids[:, :0])
        last_start = length - group
        is_start = (positions % group == 0)[:, : last_start + 1]
        is_start = is_start & (ids[:, group - 1 :] == ids[:, : last_start + 1])
        tokens = torch.arange(last_start + 1, device=device)
        starts = torch.where(is_start, tokens, length).sort(1).values[:, :count]
        index = starts.clamp_max(last_start)[:, :, None] + torch.arange(group, device=device)
        index = index.flatten(1)
        is_block = (starts < length).repeat_interleave(group, 1)
        numbers = torch.where(is_block, ids.gather(1, index), -1)
        return cls(positions.gather(1, index), numbers, index)

    def take(self, part: Tensor) -> Tensor:
        """Return the tokens (B, H, N x G, D) of a part (B, H, T, D)."""
        if self.index is None:
            return part[:, :, : self.positions.shape[1]]
        index = self.index[:, None, :, None]
        return part.gather(2, index.expand(-1, part.shape[1], -1, part.shape[3]))
