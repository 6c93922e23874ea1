"""DeepSeek-V2's configuration and weight names against kvlab's."""

from collections.abc import Iterator
from typing import Any

from kvlab.errors import PretrainedError
from kvlab.extensions.published_weights import conversion as hf
from kvlab.extensions.published_weights.architectures import Llama
from kvlab.extensions.published_weights.conversion import WeightMapping
from kvlab.spec.model_config import ModelConfig


class DeepSeekV2(Llama):
    """DeepSeek-V2 (arXiv 2405.04434) with dense layers alone: Llama with latent attention.

    Its rotary dimensions are pairs of neighbours after the others of a head. Here they come first,
    each pair half of them apart. K and V of a head are neighbours in its map from the latent.
    """

    model_type, hf_class = "deepseek_v2", "DeepseekV2ForCausalLM"
    LATENT_NORM_EPS = 1e-6
    """Of the latents' norm in `transformers`, whatever ``rms_norm_eps`` is."""

    def read_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        head_dim = hf_config["qk_nope_head_dim"]
        supported = {
            "v_head_dim": (head_dim,),
            "num_key_value_heads": (hf_config["num_attention_heads"],),
            "rms_norm_eps": (self.LATENT_NORM_EPS,),
            "first_k_dense_replace": (hf_config["num_hidden_layers"],),  # no mixtures of experts
        }
        hf.require_values({"first_k_dense_replace": 0, **hf_config}, supported)
        kv = {
            "latent": hf_config["kv_lora_rank"],
            "rotary": hf_config["qk_rope_head_dim"],
            "query": hf_config["q_lora_rank"],
        }
        rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
        hf.require_values(rope, {"rope_type": ("default",)})
        return {**super().read_config(hf_config), "head_dim": head_dim, "kv": kv}

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        kv: Any = config.kv
        if getattr(kv, "name", "") != "latent":
            raise PretrainedError("kv is not latent")
        return {
            **super().write_config(config),
            "num_key_value_heads": config.n_head,
            "q_lora_rank": kv.query,
            "kv_lora_rank": kv.latent,
            "qk_nope_head_dim": config.head_dim,
            "qk_rope_head_dim": kv.rotary,
            "v_head_dim": config.head_dim,
            "head_dim": kv.rotary,  # of the rotary frequencies
            "first_k_dense_replace": config.n_layer,
        }

    def iter_weights(self, config: ModelConfig) -> Iterator[WeightMapping]:
        kv: Any = config.kv
        latent, rotary, head_dim = kv.latent, kv.rotary, config.head_dim
        pairs = [*range(0, rotary, 2), *range(1, rotary, 2)]
        q = [*(head_dim + row for row in pairs), *range(head_dim)]
        q_width, key_dim = config.n_head * (head_dim + rotary), head_dim + rotary
        q_order = [head * key_dim + row for head in range(config.n_head) for row in q]
        q_rows = kv.query or q_width
        qkv_order = [*range(q_rows)] if kv.query else q_order
        qkv_order += [q_rows + row for row in range(latent)]
        qkv_order += [q_rows + latent + row for row in pairs]
        up_order = [
            (2 * head + part) * head_dim + row
            for part in range(2)
            for head in range(config.n_head)
            for row in range(head_dim)
        ]
        for mapping in super().iter_weights(config):
            if not mapping.name.endswith("attention.qkv.weight"):
                yield mapping
                continue
            block = mapping.name.removesuffix("qkv.weight")
            q_name, *_ = mapping.hf_names
            hf_block = q_name.removesuffix("q_proj.weight")
            if kv.query:
                q_up = (f"{hf_block}q_b_proj.weight",)
                yield WeightMapping(f"{block}q_up.weight", q_up, order=tuple(q_order))
                yield WeightMapping(f"{block}q_norm.weight", (f"{hf_block}q_a_layernorm.weight",))
                q_name = f"{hf_block}q_a_proj.weight"
            names = (q_name, f"{hf_block}kv_a_proj_with_mqa.weight")
            rows = (q_rows, latent + rotary)
            yield WeightMapping(mapping.name, names, rows, order=tuple(qkv_order))
            yield WeightMapping(f"{block}kv.norm.weight", (f"{hf_block}kv_a_layernorm.weight",))
            up = (f"{hf_block}kv_b_proj.weight",)
            yield WeightMapping(f"{block}kv.up.weight", up, order=tuple(up_order))
