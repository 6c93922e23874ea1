"""Attention of one layer. B rows, C tokens of this pass, H heads, D head_dim, E n_embd.

Multi-head, grouped-query and multi-query attention are this one class with ``n_kv_head``; local
and global layers differ in ``window``; sharing across layers is whether the layer writes.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.cache import AttentionPass, KeysValues
from kvlab.model.attention_backends import BACKENDS, select_backend
from kvlab.model.kernels.linear import Linear, linear
from kvlab.model.positions import RopeTable, apply_rope
from kvlab.spec.model_config import ModelConfig


class Attention(nn.Module):
    """Causal self-attention; a consumer of another layer's K/V has no K/V projections.

    ``qkv`` holds the rows of the query, key and value projections in this order, those of K
    and V only if the layer owns them.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.n_head, self.n_kv_head, self.head_dim = (
            config.n_head,
            config.n_kv_head,
            config.head_dim,
        )
        self.window = config.window if config.layer_kinds[layer] == "L" else None
        self.q_width = config.n_head * config.head_dim
        owns = config.kv_owners[layer] == layer
        self.kv_width = config.n_kv_head * config.head_dim if owns else 0
        self.qkv = Linear(config.n_embd, self.q_width + 2 * self.kv_width, bias=config.bias)
        self.proj = Linear(self.q_width, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, step: AttentionPass, rotation: RopeTable | None) -> Tensor:
        """(B, C, E) -> (B, C, E); reads and writes K/V through ``step``."""
        rows, count, _ = x.shape
        if step.writes(self.layer):
            q, k, v = self.qkv(x).split([self.q_width, self.kv_width, self.kv_width], -1)
            k = k.view(rows, count, self.n_kv_head, self.head_dim).transpose(1, 2)
            v = v.view(rows, count, self.n_kv_head, self.head_dim).transpose(1, 2)
            step.put(self.layer, apply_rope(k, rotation), v)
        elif self.kv_width:  # tied at serving: this layer's own K/V are not asked for
            bias = None if self.qkv.bias is None else self.qkv.bias[: self.q_width]
            q = linear(x, self.qkv.weight[: self.q_width], bias)
        else:
            q = self.qkv(x)
        q = apply_rope(q.view(rows, count, self.n_head, self.head_dim).transpose(1, 2), rotation)
        y = attend(q, step.get(self.layer), self.window)
        step.done(self.layer)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(rows, count, self.q_width))
        return out


def attend(q: Tensor, context: KeysValues, window: int | None) -> Tensor:
    """Queries (B, H, C, D) over what a layer may read -> (B, H, C, D)."""
    k, v, mask = context.k, context.v, context.mask
    rows, heads, count, head_dim = q.shape
    kv_heads = k.shape[1]
    if count == 1 and (mask is not None or not context.ordered):
        # Decode: the queries of a K/V head's group become rows of one small matrix, so K and V
        # are neither copied nor read once a query head: 2.6 times as fast as enable_gqa for
        # 12 heads on 1 and 1,024 tokens on CPU.
        q = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(
            rows, heads, 1, head_dim
        )
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=heads != kv_heads)
    documents = context.documents
    backend = select_backend(q, k.shape[2], window, documents is not None)
    return BACKENDS[backend](q, k, v, window, documents)
