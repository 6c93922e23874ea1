# ruff: noqa: ARG002 (not every view of K and V uses all arguments)
"""Self-attention of one layer.

Multi-head, grouped-query and multi-query attention are one class with ``n_kv_head``. Local and
global layers differ in ``window``. A layer that shares another layer's K/V does not write its own.
`SeparateKV` reads K and V from what a token stores; `kvlab.spec.kv_forms` names it and others.

Shapes: B rows, C tokens of this pass, P past tokens, H heads, Hkv K/V heads or latents, D head_dim,
Dk width of a head of Q and K, L latent, R rotary key, E n_embd.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from kvlab.cache import AttentionPass, KVContext, Stored
from kvlab.model.attention_backends import BACKENDS, note_kernel, scaled_dot_product, select_backend
from kvlab.model.causal_mask import CausalMask
from kvlab.model.decode_attention import Keys, attend_decoded, decode_stored
from kvlab.model.kernels.linear import Linear
from kvlab.model.rope import PassRotation, RopeTable, apply_rope
from kvlab.spec.layer_config import LayerConfig
from kvlab.spec.model_config import ModelConfig

Parts = tuple[Tensor, ...]
"""What tokens store: a tensor (B, count, tokens, size) for each part of `LayerConfig.stored`."""

Reads = tuple[Stored, ...]
"""The same, read from a cache: values, or codes where each row has one query."""

Attend = Callable[[Tensor, Keys, Stored], Tensor]
"""`attend` of one layer in one pass: takes q, k and v."""


class InputDtypeNorm(nn.RMSNorm):
    """An RMS norm in the dtype of its input: under autocast CUDA's is in float32, CPU's is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class TokenMixer(nn.Module, ABC):
    """What mixes the tokens of a layer: attention, or what stands in its place.

    It is made from the model's configuration and the number of its layer. `kvlab.spec.mixers` names
    its class.
    """

    @abstractmethod
    def forward(
        self, x: Tensor, attention_pass: AttentionPass, rotation: PassRotation | None
    ) -> Tensor:
        """Mix x (B, C, E) with the past tokens of ``attention_pass``; return (B, C, E)."""


class Attention(TokenMixer):
    """Causal self-attention. A consumer of another layer's K/V has no K/V projections.

    ``qkv`` stacks the rows of the query, then those of what a token stores, in the order of
    `LayerConfig.stored`; only an owner has the latter. With `LayerConfig.query_dim` the query rows
    give a vector from which ``q_up`` computes the queries.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.config = config.layers[layer]
        owns_kv = config.kv_owners[layer] == layer
        self.q_rows, query_dim = self.config.q_rows, self.config.query_dim
        self.store_width = self.config.store_width if owns_kv else 0
        self.stored = self.config.stored
        self.widths = [self.q_rows, *(part.count * part.size for part in self.stored)]
        self.qkv = Linear(config.n_embd, self.q_rows + self.store_width, bias=config.bias)
        self.q_norm = InputDtypeNorm(query_dim, eps=config.norm_eps) if query_dim else None
        self.q_up = Linear(query_dim, self.config.q_width, bias=False) if query_dim else None
        norm = partial(InputDtypeNorm, self.config.head_dim, eps=config.norm_eps)
        self.query_norm = norm() if self.config.has_qk_norm else None
        self.key_norm = norm() if self.config.has_qk_norm and owns_kv else None
        self.proj = Linear(self.config.out_width, config.n_embd, bias=config.bias)
        self.sink = nn.Parameter(torch.zeros(self.config.n_head)) if self.config.has_sink else None
        self.kv: SeparateKV = self.config.kv_form.load(self.config.kv_form.view)(
            self.config, owns_kv, config.norm_eps
        )

    def forward(
        self, x: Tensor, attention_pass: AttentionPass, rotation: PassRotation | None
    ) -> Tensor:
        """Attend within x (B, C, E) and to the past tokens of ``attention_pass``.

        Returns:
            (B, C, E).
        """
        batch, length, _ = x.shape
        config, kv = self.config, self.kv
        rope = None if rotation is None else rotation.table
        if attention_pass.writes_kv(self.layer):
            q, *projected = self.qkv(x).split(self.widths, -1)
            parts = tuple(
                values.view(batch, length, part.count, part.size).transpose(1, 2)
                for values, part in zip(projected, self.stored, strict=True)
            )
            if self.key_norm is not None:
                parts = (self.key_norm(parts[0]), *parts[1:])
            attention_pass.write_kv(self.layer, *kv.store(parts, rope))
        elif self.store_width:  # tied at serving: do not compute the layer's own K/V
            q = self.qkv(x, slice(self.q_rows))
        else:
            q = self.qkv(x)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q = q.view(batch, length, config.n_head, config.key_dim).transpose(1, 2)
        if self.query_norm is not None:
            q = self.query_norm(q)
        if config.attention_scale is not None:  # backends divide by the root of the width
            q = q * (config.attention_scale * math.sqrt(config.key_dim))
        q = apply_rope(q, rope)
        attention_pass.observe_queries(self.layer, q, self.sink)
        context = attention_pass.read_kv(self.layer)
        key_rope = None
        if rotation is not None and kv.is_rotated_on_read:
            key_rope = rotation.at(attention_pass.key_positions(self.layer))
        attend_layer = partial(attend, context=context, layer=config, sink=self.sink)
        y = kv.restore(kv.attend(q, context.parts, key_rope, attend_layer), rotation)
        attention_pass.end_layer(self.layer)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, config.out_width))
        return out


def attend(
    q: Tensor, k: Keys, v: Stored, *, context: KVContext, layer: LayerConfig, sink: Tensor | None
) -> Tensor:
    """Attend queries q (B, H, C, Dk) to k (B, Hkv, P + C, Dk) and v (B, Hkv, P + C, D).

    Args:
        context: which of the keys the queries see.
        layer: the window and the sink tokens of causal queries.
        sink: (H,) logits that join the denominators of the heads; or None.

    Returns:
        (B, H, C, D).
    """
    mask = context.mask
    batch, n_head, length, key_dim = q.shape
    n_kv_head = v.shape[1]
    if length == 1 and (mask is not None or not context.is_causal):
        # Decoding: the queries of a K/V head's group become rows of one small matrix, so K and V
        # are neither repeated nor read once for each query head, as by enable_gqa.
        q = q.reshape(batch, n_kv_head, n_head // n_kv_head, key_dim)
        sink = None if sink is None else sink.view(n_kv_head, -1)
        y = attend_decoded(q, k, v, mask, sink, context.counts)
        return y.reshape(batch, n_head, 1, v.shape[-1])
    keys, values = k.to_dense(q.dtype), decode_stored(v, q.dtype)
    if mask is not None:
        return scaled_dot_product(q, keys, values, mask, sink=sink)
    causal = CausalMask(*(context.band or (layer.window, layer.sink_tokens)), context.documents)
    name = select_backend(q, keys, values, causal, sink)
    if name == "cpu_tiled":  # the others note what runs in the end
        note_kernel(name)
    return BACKENDS[name].attend(q, keys, values, causal, sink)


class SeparateKV(nn.Module):
    """K and V are stored, K rotated.

    Attributes:
        is_rotated_on_read: keys are stored unrotated, so `attend` needs the rotations of all that
            it reads.
    """

    is_rotated_on_read = False

    def __init__(self, layer: LayerConfig, owns_kv: bool, norm_eps: float):
        super().__init__()

    def store(self, parts: Parts, rope: RopeTable | None) -> Parts:
        """Return what the tokens of a pass store, given their projections."""
        k, v = parts
        return apply_rope(k, rope), v

    def attend(self, q: Tensor, parts: Reads, rope: RopeTable | None, attend: Attend) -> Tensor:
        """Attend rotated queries q (B, H, C, Dk) to what tokens have stored.

        Args:
            rope: the rotations of the keys, with `is_rotated_on_read`.

        Returns:
            (B, H, C, D).
        """
        k, v = parts
        return attend(q, Keys(k), v)

    def restore(self, y: Tensor, rotation: PassRotation | None) -> Tensor:
        """Return what `attend` has returned (B, H, C, D) as the layer's projection takes it."""
        return y
