"""Self-attention of one layer.

Multi-head, grouped-query and multi-query attention are one class with ``n_kv_head``. Local and
global layers differ in ``window``. Sharing across layers is whether the layer writes K/V.

Shapes: B rows, C tokens of this pass, P past tokens, H heads, Hkv K/V heads, D head_dim,
E n_embd.
"""

from torch import Tensor, nn

from kvlab.cache import AttentionPass, KVContext
from kvlab.model.attention_backends import (
    BACKENDS,
    note_kernel,
    scaled_dot_product,
    select_backend,
)
from kvlab.model.kernels import Linear, linear
from kvlab.model.rope import RopeTable, apply_rope
from kvlab.spec.model_config import ModelConfig


class Attention(nn.Module):
    """Causal self-attention. A consumer of another layer's K/V has no K/V projections.

    ``qkv`` stacks the rows of the query, key and value projections in this order; those of K and
    V exist only if the layer owns them.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.config = config.layers[layer]
        self.q_width = self.config.q_width
        self.kv_width = self.config.kv_width if config.kv_owners[layer] == layer else 0
        self.qkv = Linear(config.n_embd, self.q_width + 2 * self.kv_width, bias=config.bias)
        self.proj = Linear(self.q_width, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, attention_pass: AttentionPass, rope: RopeTable | None) -> Tensor:
        """Attend within x (B, C, E) and to the past tokens of ``attention_pass``.

        Returns:
            (B, C, E).
        """
        batch, length, _ = x.shape
        head_dim, n_kv_head = self.config.head_dim, self.config.n_kv_head
        if attention_pass.writes_kv(self.layer):
            q, k, v = self.qkv(x).split([self.q_width, self.kv_width, self.kv_width], -1)
            k = k.view(batch, length, n_kv_head, head_dim).transpose(1, 2)
            v = v.view(batch, length, n_kv_head, head_dim).transpose(1, 2)
            attention_pass.write_kv(self.layer, apply_rope(k, rope), v)
        elif self.kv_width:  # tied at serving: the layer's own K/V are not used
            bias = None if self.qkv.bias is None else self.qkv.bias[: self.q_width]
            q = linear(x, self.qkv.weight[: self.q_width], bias)
        else:
            q = self.qkv(x)
        q = apply_rope(q.view(batch, length, self.config.n_head, head_dim).transpose(1, 2), rope)
        y = attend(q, attention_pass.read_kv(self.layer), self.config.window)
        attention_pass.end_layer(self.layer)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, self.q_width))
        return out


def attend(q: Tensor, context: KVContext, window: int | None) -> Tensor:
    """Attend queries q (B, H, C, D) to ``context``.

    Args:
        context: K and V (B, Hkv, P + C, D), and which of them the queries see.
        window: tokens that a causal query sees, itself included; None for all.

    Returns:
        (B, H, C, D).
    """
    (k, v), mask = context.parts, context.mask
    batch, n_head, length, head_dim = q.shape
    n_kv_head = k.shape[1]
    if length == 1 and (mask is not None or not context.is_causal):
        # Decoding: the queries of a K/V head's group become rows of one small matrix, so K and V
        # are neither repeated nor read once for each query head, as by enable_gqa.
        q = q.reshape(batch, n_kv_head, n_head // n_kv_head, head_dim)
        y = scaled_dot_product(q, k, v, mask)
        return y.reshape(batch, n_head, 1, head_dim)
    if mask is not None:
        return scaled_dot_product(q, k, v, mask)
    name = select_backend(q, k, v, window, context.documents)
    if name not in ("sdpa", "windowed_blocks"):  # those name torch's kernels
        note_kernel(name)
    return BACKENDS[name].attend(q, k, v, window, context.documents)
