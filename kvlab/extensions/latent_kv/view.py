# ruff: noqa: ARG002 (not every view of K and V uses all arguments)
"""Read K and V from latents. Shapes are those of `kvlab.model.attention`; L latent."""

import math

import torch
from torch import Tensor

from kvlab.cache import Stored
from kvlab.model.attention import Attend, InputDtypeNorm, Parts, Reads, SeparateKV
from kvlab.model.decode_attention import Keys, decode_stored
from kvlab.model.kernels.linear import Linear
from kvlab.model.rope import RopeTable, apply_rope
from kvlab.spec.layer_config import LayerConfig


class LatentView(SeparateKV):
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Every head's K and V are linear maps of a latent vector, which is normalized (RMS norm) before
    it is stored. Beside it K has a rotary key that all heads share. With several latents it is
    grouped latent attention (GLA, arXiv 2505.21487).

    ``up`` stacks for each latent the rows of K of its heads, then those of V. It has no bias.
    """

    def __init__(self, layer: LayerConfig, owns_kv: bool, norm_eps: float):
        super().__init__(layer, owns_kv, norm_eps)
        self.layer, self.latent_dim = layer, layer.stored[0].size
        self.norm = InputDtypeNorm(self.latent_dim, eps=norm_eps) if owns_kv else None
        self.up = Linear(self.latent_dim, 2 * layer.out_width, bias=False)

    def store(self, parts: Parts, rope: RopeTable | None) -> Parts:
        assert self.norm is not None, "a consumer stores nothing"
        latent, *rotary_key = parts
        return self.norm(latent), *(apply_rope(key, rope) for key in rotary_key)

    def attend(self, q: Tensor, parts: Reads, rope: RopeTable | None, attend: Attend) -> Tensor:
        latents, shared = parts[0], parts[1] if len(parts) > 1 else None
        is_absorbed = self.is_absorbed(q.shape[2], latents.shape[2])
        attend_by = self.attend_absorbed if is_absorbed else self.attend_expanded
        return attend_by(q, latents, shared, attend)

    def is_absorbed(self, queries: int, keys: int) -> bool:
        """Return whether it takes fewer FLOPs to attend to the latents themselves.

        In training it never does, since there are as many queries as keys.
        """
        head_dim, latent_dim = self.layer.head_dim, self.latent_dim
        # FLOPs of one head; work that both ways share is left out
        expanded = keys * 2 * head_dim * latent_dim + queries * keys * 2 * head_dim
        absorbed = queries * 2 * head_dim * latent_dim + queries * keys * 2 * latent_dim
        return queries < keys and absorbed < expanded

    def attend_expanded(
        self, q: Tensor, stored: Stored, shared: Stored | None, attend: Attend
    ) -> Tensor:
        """Attend to every head's own K and V, made from the latents."""
        latents = decode_stored(stored, q.dtype)
        batch, groups, count, _ = latents.shape
        heads = (2, self.layer.n_head // groups, self.layer.head_dim)
        rows = len(self.up.weight) // groups
        expanded = [
            self.up(latent, slice(group * rows, (group + 1) * rows)).view(batch, count, *heads)
            for group, latent in enumerate(latents.unbind(1))
        ]
        k, v = (
            torch.cat([group[:, :, part] for group in expanded], 2).transpose(1, 2)
            for part in range(2)
        )
        return attend(q, Keys(k, shared=shared), v)

    def attend_absorbed(
        self, q: Tensor, latents: Stored, shared: Stored | None, attend: Attend
    ) -> Tensor:
        """Attend to the latents: queries go through the map to K, the result through that to V."""
        groups, latent_dim = latents.shape[1], latents.shape[3]
        head_dim, rotary_dim = self.layer.head_dim, self.layer.rotary_dim
        up = self.up.weight.view(groups, 2, -1, head_dim, latent_dim)
        rotary_q, own_q = torch.split(q, [rotary_dim, head_dim], -1)
        by_group = (q.shape[0], groups, -1, q.shape[2])
        own_q = torch.einsum("bghcd,ghdl->bghcl", own_q.reshape(*by_group, head_dim), up[:, 0])
        own_q = own_q.flatten(1, 2)
        # attention divides by the root of its q's width, which should be that of expanded heads
        key_dim = head_dim + rotary_dim
        joined_q = torch.cat([rotary_q, own_q], -1)
        joined_q = joined_q * math.sqrt(joined_q.shape[-1] / key_dim)
        y = attend(joined_q, Keys(latents, shared=shared), latents)
        y = torch.einsum("bghcl,ghdl->bghcd", y.reshape(*by_group, latent_dim), up[:, 1])
        return y.flatten(1, 2)
