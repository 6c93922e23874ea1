"""GPT-2, all four sizes: learned positions, layer norms, tanh GELU, biases, a tied head."""

from collections.abc import Iterator
from typing import Any

from kvlab.model.architecture import Architecture, Weight, refuse_values
from kvlab.spec.model import ModelConfig

_LINEAR = {
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


class GPT2(Architecture):
    prefix = "transformer."
    ignored = (".attn.bias", ".attn.masked_bias")

    def read_config(self, theirs: dict[str, Any]) -> dict[str, Any]:
        refuse_values(
            theirs,
            {
                "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
                "tie_word_embeddings": (True,),
            },
        )
        return {
            "vocab_size": theirs["vocab_size"],
            "block_size": theirs["n_positions"],
            "n_layer": theirs["n_layer"],
            "n_head": theirs["n_head"],
            "n_embd": theirs["n_embd"],
            "ffn_dim": theirs.get("n_inner") or 4 * theirs["n_embd"],
            "norm_eps": theirs["layer_norm_epsilon"],
        }

    def misfits(self, ours: ModelConfig) -> list[str]:
        wanted: dict[str, Any] = {
            "position": "learned",
            "norm": "layernorm",
            "mlp": "gelu",
            "bias": True,
            "tie_embeddings": True,
            "n_kv_head": ours.n_head,
            "head_dim": ours.n_embd // ours.n_head,
            "window": None,
            "kv_owners": tuple(range(ours.n_layer)),
        }
        return [
            f"{key} is not {value}" for key, value in wanted.items() if getattr(ours, key) != value
        ]

    def write_config(self, ours: ModelConfig) -> dict[str, Any]:
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",
            "vocab_size": ours.vocab_size,
            "n_positions": ours.block_size,
            "n_layer": ours.n_layer,
            "n_head": ours.n_head,
            "n_embd": ours.n_embd,
            "n_inner": ours.ffn_dim,
            "layer_norm_epsilon": ours.norm_eps,
            "tie_word_embeddings": True,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }

    def weights(self, ours: ModelConfig) -> Iterator[Weight]:
        yield Weight("token_embedding.weight", ("transformer.wte.weight",))
        yield Weight("position_embedding.weight", ("transformer.wpe.weight",))
        norms = {"norm": "transformer.ln_f"}
        for layer in range(ours.n_layer):
            norms[f"blocks.{layer}.norm1"] = f"transformer.h.{layer}.ln_1"
            norms[f"blocks.{layer}.norm2"] = f"transformer.h.{layer}.ln_2"
            for mine, name in _LINEAR.items():
                own, their = f"blocks.{layer}.{mine}", f"transformer.h.{layer}.{name}"
                yield Weight(f"{own}.weight", (f"{their}.weight",), turned=True)
                yield Weight(f"{own}.bias", (f"{their}.bias",))
        for mine, name in norms.items():
            for part in ("weight", "bias"):
                yield Weight(f"{mine}.{part}", (f"{name}.{part}",))
