"""Published architectures: Hugging Face's configurations and weight names against kvlab's.

The table is in ``pretrained.py``, by ``model_type``. To add an architecture, add a class here and
an entry there; the contract in the tests says what it must do.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from kvlab.errors import PretrainedError
from kvlab.extensions.published_weights import conversion as hf
from kvlab.extensions.published_weights.conversion import Architecture, WeightMapping
from kvlab.spec.model_config import ModelConfig

_GPT2_LINEAR = {
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


class GPT2(Architecture):
    """GPT-2 in all four sizes: learned positions, layer norms, tanh GELU, biases, a tied head."""

    model_type, hf_class, prefix = "gpt2", "GPT2LMHeadModel", "transformer."
    ignored_suffixes = (".attn.bias", ".attn.masked_bias")
    fields: ClassVar[dict[str, str]] = {
        **{name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")},
        "block_size": "n_positions",
        "norm_eps": "layer_norm_epsilon",
    }
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }

    def read_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        ffn_dim = hf_config.get("n_inner") or 4 * hf_config["n_embd"]
        return {**super().read_config(hf_config), "ffn_dim": ffn_dim}

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return {**super().write_config(config), "n_inner": config.ffn_dim, **dropout}

    def iter_weights(self, config: ModelConfig) -> Iterator[WeightMapping]:
        yield WeightMapping("token_embedding.weight", ("transformer.wte.weight",))
        yield WeightMapping("position_embedding.weight", ("transformer.wpe.weight",))
        norms = {"norm": "transformer.ln_f"}
        for layer in range(config.n_layer):
            block, hf_block = f"blocks.{layer}", f"transformer.h.{layer}"
            norms[f"{block}.norm1"] = f"{hf_block}.ln_1"
            norms[f"{block}.norm2"] = f"{hf_block}.ln_2"
            for name, hf_name in _GPT2_LINEAR.items():
                hf_weight = f"{hf_block}.{hf_name}.weight"
                yield WeightMapping(f"{block}.{name}.weight", (hf_weight,), transposed=True)
                yield WeightMapping(f"{block}.{name}.bias", (f"{hf_block}.{hf_name}.bias",))
        for name, hf_name in norms.items():
            for part in ("weight", "bias"):
                yield WeightMapping(f"{name}.{part}", (f"{hf_name}.{part}",))


class Llama(Architecture):
    """Llama: rotary positions, RMS norms, SwiGLU, grouped queries, no biases.

    Attributes:
        block_names: names of a layer's modules, and of their tensors in a checkpoint's layer.
        is_tied: the default of ``tie_word_embeddings``.
    """

    model_type, hf_class, prefix = "llama", "LlamaForCausalLM", "model."
    is_tied = False
    ignored_suffixes: tuple[str, ...] = (".rotary_emb.inv_freq",)
    fields: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "block_size": "max_position_embeddings",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "ffn_dim": "intermediate_size",
        "norm_eps": "rms_norm_eps",
    }
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
    constants: ClassVar[dict[str, Any]] = {
        "position": "rope",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "bias": False,
    }
    block_names: ClassVar[dict[str, str]] = {
        "attention.proj": "self_attn.o_proj",
        "mlp.down": "mlp.down_proj",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
    }

    def read_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        fields = super().read_config(hf_config)
        n_head = fields["n_head"]
        return {
            **fields,
            "n_kv_head": hf_config.get("num_key_value_heads") or n_head,
            "head_dim": hf_config.get("head_dim") or hf_config["hidden_size"] // n_head,
            **self.read_rotations(hf_config),
            "tie_embeddings": bool(hf_config.get("tie_word_embeddings", self.is_tied)),
        }

    def read_rotations(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a `ModelConfig` that say how layers rotate."""
        rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
        return hf.read_rope(rope, hf_config.get("rope_theta") or 10_000.0, hf_config)

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        layer = config.layers[0]
        return {
            **super().write_config(config),
            "num_key_value_heads": layer.n_kv_head,
            "head_dim": layer.head_dim,
            "rope_theta": layer.rope_theta,
            "rope_parameters": hf.write_rope(layer),
            "tie_word_embeddings": config.tie_embeddings,
        }

    def iter_weights(self, config: ModelConfig) -> Iterator[WeightMapping]:
        first = config.layers[0]
        q_width, kv_width = first.q_width, first.n_kv_head * first.head_dim
        yield WeightMapping("token_embedding.weight", ("model.embed_tokens.weight",))
        yield WeightMapping("norm.weight", ("model.norm.weight",))
        if not config.tie_embeddings:
            yield WeightMapping("lm_head.weight", ("lm_head.weight",))
        for layer in range(config.n_layer):
            block, hf_block = f"blocks.{layer}", f"model.layers.{layer}"
            qkv = tuple(f"{hf_block}.self_attn.{part}_proj.weight" for part in "qkv")
            up = tuple(f"{hf_block}.mlp.{part}_proj.weight" for part in ("gate", "up"))
            yield WeightMapping(f"{block}.attention.qkv.weight", qkv, (q_width, kv_width, kv_width))
            yield WeightMapping(f"{block}.mlp.up.weight", up, (config.ffn_dim, config.ffn_dim))
            for name, hf_name in self.block_names.items():
                yield WeightMapping(f"{block}.{name}.weight", (f"{hf_block}.{hf_name}.weight",))


class Qwen3(Llama):
    """Llama with norms of queries and keys (arXiv 2505.09388)."""

    model_type, hf_class = "qwen3", "Qwen3ForCausalLM"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
    }
    constants: ClassVar[dict[str, Any]] = {**Llama.constants, "qk_norm": True}
    block_names: ClassVar[dict[str, str]] = {
        **Llama.block_names,
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
    }


class Gemma3(Qwen3):
    """The text model of Gemma 3 (arXiv 2503.19786): Qwen3 with norms on both sides of attention
    and MLP, a GELU as the gate, scaled embeddings, and rotations of their own in local layers.

    Norms in a checkpoint have their weights less one.
    """

    model_type, hf_class, is_tied = "gemma3_text", "Gemma3ForCausalLM", True
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    }
    constants: ClassVar[dict[str, Any]] = {
        **Qwen3.constants,
        "mlp": "geglu",
        "norm_placement": "sandwich",
    }
    block_names: ClassVar[dict[str, str]] = {
        **Qwen3.block_names,
        "norm2": "pre_feedforward_layernorm",
        "post_norm1": "post_attention_layernorm",
        "post_norm2": "post_feedforward_layernorm",
    }

    def read_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        fields = super().read_config(hf_config)
        scalar = hf_config.get("query_pre_attn_scalar", 256)
        scale = None if scalar == fields["head_dim"] else scalar**-0.5
        exact = hf_config.get("attention_scale", scale)  # as `write_config` adds it
        return {
            **fields,
            **hf.read_layer_types(hf_config, hf_config.get("sliding_window_pattern", 6)),
            "embedding_scale": fields["n_embd"] ** 0.5,
            "attention_scale": exact if exact and round(exact**-2) == scalar else scale,
        }

    def read_rotations(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        rope = hf_config.get("rope_parameters") or {
            "full_attention": hf_config.get("rope_scaling") or {}
        }
        kinds = {
            "global": ("full_attention", hf_config.get("rope_theta") or 1e6),
            "local": ("sliding_attention", hf_config.get("rope_local_base_freq") or 1e4),
        }
        letters = hf.read_layer_types(hf_config, hf_config.get("sliding_window_pattern", 6))
        return {
            key: hf.read_rope(rope.get(name) or {}, theta, hf_config)
            for key, (name, theta) in kinds.items()
            if key[0].upper() in letters["attention_pattern"]
        }

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        hf_config = super().write_config(config)
        del hf_config["rope_theta"]
        scale = config.attention_scale
        scalar = config.head_dim if scale is None else scale**-2
        if abs(scalar - round(scalar)) >= 1e-6 * scalar:
            raise PretrainedError("attention_scale is not 1 / sqrt(a whole number)")
        return {
            **hf_config,
            **hf.write_layer_types(config),
            "rope_parameters": {
                "sliding_attention" if layer.window else "full_attention": hf.write_rope(layer)
                for layer in config.layers
            },
            "query_pre_attn_scalar": round(scalar),
            "attention_scale": scale,  # ours: to the last bit
            "pad_token_id": None,  # the default is of another tokenizer
        }

    def iter_weights(self, config: ModelConfig) -> Iterator[WeightMapping]:
        for mapping in super().iter_weights(config):
            is_norm = "norm" in mapping.name
            yield replace(mapping, offset=1.0) if is_norm else mapping


class Mistral(Llama):
    """Llama with a sliding window of W tokens, the token itself included, in every layer."""

    model_type, hf_class = "mistral", "MistralForCausalLM"

    def read_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        window = hf_config.get("sliding_window", 4096)
        local_layers = {} if window is None else {"attention_pattern": "L", "window": window}
        return {**super().read_config(hf_config), **local_layers}

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        return {**super().write_config(config), "sliding_window": config.layers[0].window}


class SmolLM3(Llama):
    """Llama with layers that do not rotate, and with windows in some layers."""

    model_type, hf_class, is_tied = "smollm3", "SmolLM3ForCausalLM", True

    def read_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        interval, depth = hf_config.get("no_rope_layer_interval", 4), hf_config["num_hidden_layers"]
        rotates = hf_config.get("no_rope_layers") or [
            int((layer + 1) % interval != 0) for layer in range(depth)
        ]
        window = hf_config.get("sliding_window") if hf_config.get("use_sliding_window") else None
        types = hf_config.get("layer_types") or [
            "full_attention" if rotates[layer] else "sliding_attention" for layer in range(depth)
        ]
        is_local = [window is not None and one == "sliding_attention" for one in types]
        letters = ["LM"[not turns] if local else "GN"[not turns]
                   for turns, local in zip(rotates, is_local, strict=False)]  # fmt: skip
        kinds = {"N": {"position": "none"}, "M": {"position": "none", "window": window}}
        return {
            **super().read_config(hf_config),
            "attention_pattern": "".join(letters),
            "window": window if "L" in letters else None,
            "kinds": {letter: kinds[letter] for letter in kinds if letter in letters},
        }

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        return {
            **super().write_config(config),
            **hf.write_layer_types(config),
            "no_rope_layers": [int(layer.rotary_dim > 0) for layer in config.layers],
            "use_sliding_window": any(layer.window for layer in config.layers),
            "pad_token_id": None,  # the default is of another tokenizer
        }
