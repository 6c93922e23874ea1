"""Llama: rotary positions, RMS norms, SwiGLU, grouped queries, no biases."""

from collections.abc import Iterator
from typing import Any

from kvlab.errors import PretrainedError
from kvlab.model.architecture import Architecture, Weight, refuse_values
from kvlab.spec.model import ModelConfig


class Llama(Architecture):
    prefix = "model."
    ignored = (".rotary_emb.inv_freq",)

    def read_config(self, theirs: dict[str, Any]) -> dict[str, Any]:
        refuse_values(
            theirs,
            {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
        )
        heads = theirs["num_attention_heads"]
        return {
            "vocab_size": theirs["vocab_size"],
            "block_size": theirs["max_position_embeddings"],
            "n_layer": theirs["num_hidden_layers"],
            "n_head": heads,
            "n_kv_head": theirs.get("num_key_value_heads") or heads,
            "n_embd": theirs["hidden_size"],
            "head_dim": theirs.get("head_dim") or theirs["hidden_size"] // heads,
            "ffn_dim": theirs["intermediate_size"],
            "position": "rope",
            "rope_theta": float(_rope_theta(theirs)),
            "norm": "rmsnorm",
            "norm_eps": theirs["rms_norm_eps"],
            "mlp": "swiglu",
            "bias": False,
            "tie_embeddings": bool(theirs.get("tie_word_embeddings", False)),
        }

    def misfits(self, ours: ModelConfig) -> list[str]:
        wanted: dict[str, Any] = {
            "position": "rope",
            "norm": "rmsnorm",
            "mlp": "swiglu",
            "bias": False,
            "kv_owners": tuple(range(ours.n_layer)),
        }
        found = [
            f"{key} is not {value}" for key, value in wanted.items() if getattr(ours, key) != value
        ]
        return found + self.window_misfits(ours)

    def window_misfits(self, ours: ModelConfig) -> list[str]:
        return [] if ours.window is None else [f"window is {ours.window}"]

    def write_config(self, ours: ModelConfig) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "vocab_size": ours.vocab_size,
            "max_position_embeddings": ours.block_size,
            "num_hidden_layers": ours.n_layer,
            "num_attention_heads": ours.n_head,
            "num_key_value_heads": ours.n_kv_head,
            "hidden_size": ours.n_embd,
            "head_dim": ours.head_dim,
            "intermediate_size": ours.ffn_dim,
            "rms_norm_eps": ours.norm_eps,
            "rope_theta": ours.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": ours.rope_theta},
            "tie_word_embeddings": ours.tie_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
        }

    def weights(self, ours: ModelConfig) -> Iterator[Weight]:
        queries, keys = ours.n_head * ours.head_dim, ours.n_kv_head * ours.head_dim
        yield Weight("token_embedding.weight", ("model.embed_tokens.weight",))
        yield Weight("norm.weight", ("model.norm.weight",))
        if not ours.tie_embeddings:
            yield Weight("lm_head.weight", ("lm_head.weight",))
        for layer in range(ours.n_layer):
            own, their = f"blocks.{layer}.", f"model.layers.{layer}."
            qkv = tuple(f"{their}self_attn.{part}_proj.weight" for part in "qkv")
            up = tuple(f"{their}mlp.{part}_proj.weight" for part in ("gate", "up"))
            yield Weight(f"{own}attention.qkv.weight", qkv, (queries, keys, keys))
            yield Weight(f"{own}attention.proj.weight", (f"{their}self_attn.o_proj.weight",))
            yield Weight(f"{own}mlp.up.weight", up, (ours.ffn_dim, ours.ffn_dim))
            yield Weight(f"{own}mlp.down.weight", (f"{their}mlp.down_proj.weight",))
            yield Weight(f"{own}norm1.weight", (f"{their}input_layernorm.weight",))
            yield Weight(f"{own}norm2.weight", (f"{their}post_attention_layernorm.weight",))


def _rope_theta(theirs: dict[str, Any]) -> float:
    """The base of plain rotary embeddings; scaled ones are refused."""
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise PretrainedError(f"config.json: rope_type = {kind} is not supported; only default is")
    theta: float = rope.get("rope_theta") or theirs.get("rope_theta") or 10_000.0
    return theta
