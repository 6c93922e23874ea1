"""A training's pass whose queries read each token as KIVI's cache would give it to them.

The newest tokens are in full precision, so what a query reads of a token depends on the query's
position. With L(q) the tokens that are quantized when q is decoded, the
query at position q reads the rounded keys before L(q) and the exact ones from L(q) to q. Both
copies are among the keys of one pass, n + L(n) for n tokens, and a mask gives each query one copy
of each token. A block's codes depend on its tokens alone, so they are those of the cache.

Shapes: B rows, H heads of a part, T tokens, K keys, N blocks, G tokens of a block, D width of a
part, R rows that differ: 1, or B with documents.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvlab.cache.attention_pass import DocumentMask, KVContext
from kvlab.cache.kv_buffer import concatenate_parts
from kvlab.cache.uncached_passes import OneShotPass, make_additive_mask, round_straight_through
from kvlab.extensions.kivi.buffers import BlockFormat
from kvlab.extensions.kivi.config import BlockRule, KIVIDType
from kvlab.spec.dtypes import KVStorage
from kvlab.spec.model_config import ModelConfig


class BlockwisePass(OneShotPass):
    """A pass whose queries read each token as KIVI's cache holds it at the query's own time."""

    def __init__(
        self,
        config: ModelConfig,
        kv: KVStorage,
        length: int,
        device: torch.device,
        documents: DocumentMask | None,
    ):
        super().__init__(config.kv_owners, length, device, documents)
        self._windows = [layer.window for layer in config.layers]
        dtype = kv.block_dtype
        assert isinstance(dtype, KIVIDType), "its `one_shot_pass` names this class"
        self._rule = rule = dtype.make_rule(kv)
        self._blocks = _Blocks.find(rule, length, device, documents)
        per_byte = dtype.numbers_per_item
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
