"""The arithmetic of gated DeltaNet: weights, FLOPs and bytes of its state."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.spec.mixers import Mixer

if TYPE_CHECKING:
    from kvlab.spec.layer_config import LayerConfig
    from kvlab.spec.model_config import ModelConfig

CHUNK_TOKENS = 64
"""Tokens that a pass computes at once. A longer chunk has fewer steps and more pairs of tokens."""


@dataclass(frozen=True)
class GatedDeltaMixer(Mixer):
    """Gated DeltaNet (arXiv 2412.06464); see `kvlab.extensions.linear_attention.gated_delta`.

    A layer has ``n_kv_head`` states of ``head_dim`` x ``head_dim`` numbers. As in grouped-query
    attention, ``n_head / n_kv_head`` query heads read one.
    """

    letter = "D"
    module = "kvlab.extensions.linear_attention.gated_delta:GatedDelta"

    def state(self, layer: "LayerConfig") -> tuple[tuple[int, ...], ...]:
        return ((layer.n_kv_head, layer.head_dim, layer.head_dim),)

    def weights(self, model: "ModelConfig", number: int) -> int:
        """Return those of q, the gate and the output; of k and v; of two rates for each state."""
        layer = model.layers[number]
        kv_width = layer.n_kv_head * layer.head_dim
        return model.n_embd * (3 * layer.out_width + 2 * kv_width + 2 * layer.n_kv_head)

    def vectors(self, model: "ModelConfig", number: int) -> int:
        """Return biases, the scale and the offset of each state's decay, and the norm's weights."""
        layer = model.layers[number]
        kv_width = layer.n_kv_head * layer.head_dim
        biases = 2 * layer.out_width + 2 * kv_width + model.n_embd if model.bias else 0
        return biases + 2 * layer.n_kv_head + layer.head_dim

    def products(self, layer: "LayerConfig", tokens: int) -> int:  # noqa: ARG002
        """Return those of the recurrence, which chunks compute with more: each state is multiplied
        by a key and by its queries, and a product of key and value is added to it."""
        return (2 * layer.n_kv_head + layer.n_head) * layer.head_dim**2

    def decode_flops(self, layer: "LayerConfig", seen: int) -> int:
        return 2 * self.products(layer, seen)

    def saved_bytes(self, layer: "LayerConfig", tokens: int, item_bytes: int) -> int:
        """Return those of the projections, and in the recurrence's precision those of heads, of the
        pairs that a token is in within its chunk, and of its share of the chunk's state."""
        chunk, kv_width = min(tokens, CHUNK_TOKENS), layer.n_kv_head * layer.head_dim
        projections = 5 * layer.out_width + 4 * kv_width
        heads = 4 * layer.out_width + 8 * kv_width
        pairs = (5 * layer.n_kv_head + 2 * layer.n_head) * chunk
        recurrence = heads + pairs + layer.head_dim * kv_width // chunk
        return item_bytes * projections + max(item_bytes, 4) * recurrence


MIXER = GatedDeltaMixer()
