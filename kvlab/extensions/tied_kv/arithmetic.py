"""Forms of K/V in which K and V come from one tensor: what a token stores, and FLOPs. No torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.spec import spec_model as spec
from kvlab.spec.kv_forms import KVForm, StoredVectors, find_rotary_key_problems

if TYPE_CHECKING:
    from kvlab.spec.layer_config import LayerConfig
    from kvlab.spec.model_config import ModelConfig


@dataclass(frozen=True)
class TiedForm(KVForm):
    """One tensor is V and, rotated when it is read, K."""

    name = "tied"
    view = "kvlab.extensions.tied_kv.views:TiedKV"
    parts = ("v",)

    def stored(self, layer: "LayerConfig") -> tuple[StoredVectors, ...]:
        return (StoredVectors(layer.n_kv_head, layer.head_dim),)

    def flops_per_key(self, layer: "LayerConfig") -> int:
        return super().flops_per_key(layer) + 3 * layer.n_kv_head * layer.rotary_dim


@dataclass(frozen=True)
class RotatedTiedForm(KVForm):
    """One tensor is K and V, stored with the rotation of its position, which the output is freed of
    by that of the query. So values turn with their distance (DeepSeek-V4)."""

    name = "rotated_tied"
    view = "kvlab.extensions.tied_kv.views:RotatedTiedKV"
    parts = ("v",)

    def stored(self, layer: "LayerConfig") -> tuple[StoredVectors, ...]:
        return (StoredVectors(layer.n_kv_head, layer.head_dim),)

    def find_problems(self, model: "ModelConfig") -> spec.Problems:
        if not model.position_scheme.is_rotary:
            yield "kv", f"needs position: rope, not {model.position}; use tied instead"


@dataclass(frozen=True)
class GroupedTiedForm(KVForm):
    """One tensor is V, and its first half is half of K; a rotary key for all heads is the other
    half (GTA, arXiv 2505.21487)."""

    name = "grouped_tied"
    view = "kvlab.extensions.tied_kv.views:GroupedTiedKV"
    parts = ("v", "rotary_key")
    shares_rotary_key = True

    def stored(self, layer: "LayerConfig") -> tuple[StoredVectors, ...]:
        heads = StoredVectors(layer.n_kv_head, layer.head_dim)
        return heads, StoredVectors(1, layer.rotary_dim, "rotary key")

    def rotated_dims(self, head_dim: int, share: float) -> int:  # noqa: ARG002
        return head_dim // 2

    def find_problems(self, model: "ModelConfig") -> spec.Problems:
        yield from find_rotary_key_problems(model)
        if not model.position_scheme.is_rotary:
            yield "kv", f"needs position: rope, not {model.position}; use tied instead"
        for head_dim in sorted({layer.head_dim for layer in model.layers if layer.head_dim % 4}):
            text = f"needs a head_dim that is a multiple of 4, not {head_dim}"
            yield "kv", f"{text}: half of it is rotated in pairs"


TIED, ROTATED_TIED, GROUPED_TIED = TiedForm(), RotatedTiedForm(), GroupedTiedForm()
