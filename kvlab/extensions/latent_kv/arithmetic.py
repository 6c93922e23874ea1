"""Latent K/V: the settings, what a token stores, weights and FLOPs. No torch."""

from typing import TYPE_CHECKING, ClassVar

from kvlab.spec import spec_model as spec
from kvlab.spec.kv_forms import KVForm, StoredVectors, find_rotary_key_problems

if TYPE_CHECKING:
    from kvlab.spec.layer_config import LayerConfig
    from kvlab.spec.model_config import ModelConfig


class LatentKV(spec.SpecModel, KVForm):
    """`model.kv` as a map: multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434).

    A token stores one latent vector, after an RMS norm of its own, and one rotary key that all
    heads share. Every head's K and V are linear maps of the latent. With ``groups`` above 1 it is
    grouped latent attention (GLA, arXiv 2505.21487): each group of heads has a latent.
    """

    name: ClassVar[str] = "latent"
    view: ClassVar[str] = "kvlab.extensions.latent_kv.view:LatentView"
    parts: ClassVar[tuple[str, ...]] = ("latent", "rotary_key")
    shares_rotary_key: ClassVar[bool] = True

    latent: spec.PositiveInt
    """Numbers of a latent vector. Unit: numbers. Example: 64, rotary: 16"""
    rotary: spec.NonNegativeInt = 0
    """Numbers of the rotary key that all heads share; above 0 if and only if position is rope.
    Unit: numbers. Example: 16, latent: 64"""
    groups: spec.PositiveInt = 1
    """Latent vectors a token, each for n_head / groups of the heads.
    Unit: vectors. Example: 2, latent: 64, rotary: 16"""
    query: spec.PositiveInt | None = None
    """Numbers of the vector that a token's queries are mapped from, after an RMS norm of its own.
    It is not stored; it saves weights.
    Unit: numbers. Default: queries are projected directly. Example: 96, latent: 64, rotary: 16"""

    def stored(self, layer: "LayerConfig") -> tuple[StoredVectors, ...]:
        latents = StoredVectors(layer.n_kv_head, self.latent, "latent")
        rotary = (StoredVectors(1, self.rotary, "rotary key"),) if self.rotary else ()
        return latents, *rotary

    def count_heads(self, n_kv_head: int) -> int:  # noqa: ARG002
        return self.groups

    def rotated_dims(self, head_dim: int, share: float) -> int:  # noqa: ARG002
        return self.rotary

    def key_dim(self, layer: "LayerConfig") -> int:
        return layer.head_dim + self.rotary

    def query_dim(self) -> int:
        return self.query or 0

    def up_weights(self, layer: "LayerConfig") -> int:
        return 2 * layer.out_width * self.latent + self.query_dim() * layer.q_width

    def norm_weights(self) -> int:
        return self.latent

    def flops_per_key(self, layer: "LayerConfig") -> int:
        """Return the FLOPs of attending to the latents themselves."""
        return 2 * layer.n_head * (2 * self.latent + self.rotary)

    def find_problems(self, model: "ModelConfig") -> spec.Problems:
        yield from find_rotary_key_problems(model, ("position", "rotary_share", "n_kv_head"))
        if model.n_kv_head != model.n_head:
            text = f"has no meaning beside kv.latent, so it must be n_head = {model.n_head}"
            yield "n_kv_head", f"{text}; use kv.groups, or leave it out"
        if model.n_head % self.groups:
            yield "kv.groups", model.describe_divisors()
        is_rotary, position = model.position_scheme.is_rotary, model.position
        if is_rotary and (self.rotary == 0 or self.rotary % 2):
            text = f"is not an even number above 0; {position} rotates pairs of this key alone"
            yield "kv.rotary", f"{text}, so use one such as {2 * -(-model.head_dim // 4)}"
        if not is_rotary and self.rotary:
            yield "kv.rotary", f"needs position: rope, not {position}; leave it out"
