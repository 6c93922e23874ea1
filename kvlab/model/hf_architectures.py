"""Published architectures: Hugging Face's configurations and weight names against kvlab's.

`ARCHITECTURES` is the table, by ``model_type``. To add an architecture, add a class here and one
entry there; the contract in ``tests/contracts/hf_architecture_contract.py`` says what it must do.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvlab.errors import PretrainedError
from kvlab.spec.layer_config import LatentKV
from kvlab.spec.model_config import ModelConfig


@dataclass(frozen=True)
class WeightMapping:
    """One parameter of `kvlab.model.GPT` as tensors of a checkpoint.

    Attributes:
        name: of the parameter.
        hf_names: of the checkpoint's tensors, stacked along the output dimension in this order.
        rows: how many of the parameter's rows each of them holds; empty if there is only one.
        transposed: the tensors are (inputs, outputs), as GPT-2's Conv1D stores them.
        order: for each row of the parameter its row in the stacked tensors; empty if equal.
    """

    name: str
    hf_names: tuple[str, ...]
    rows: tuple[int, ...] = ()
    transposed: bool = False
    order: tuple[int, ...] = ()


class Architecture(ABC):
    """One value of ``model_type`` in a Hugging Face ``config.json``.

    Attributes:
        prefix: what tensor names start with in a language model's checkpoint. The checkpoint of
            a bare model leaves it out.
        ignored_suffixes: endings of tensors that are not weights (masks, frequencies).
    """

    prefix: str
    ignored_suffixes: tuple[str, ...] = ()

    @abstractmethod
    def read_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a `ModelConfig`.

        Raises:
            PretrainedError: the checkpoint uses something that `GPT` does not have.
        """

    @abstractmethod
    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """Return Hugging Face's configuration of a model without `incompatibilities`.

        Token ids are left out: they belong to the tokenizer.
        """

    @abstractmethod
    def incompatibilities(self, config: ModelConfig) -> list[str]:
        """Return why a model cannot be written as this architecture; empty if it can."""

    @abstractmethod
    def iter_weights(self, config: ModelConfig) -> Iterator[WeightMapping]:
        """Yield the mapping of every parameter of the model."""


def require_values(hf_config: dict[str, Any], supported: dict[str, tuple[Any, ...]]) -> None:
    """Raise PretrainedError unless every key has a supported value; the first is its default."""
    for key, values in supported.items():
        value = hf_config.get(key, values[0])
        if value not in values:
            usable = " or ".join(map(str, values))
            raise PretrainedError(
                f"config.json: {key} = {value} is not supported; only {usable} is"
            )


def _list_differences(config: ModelConfig, required: dict[str, Any]) -> list[str]:
    """Return what a model, or one of its layers, has otherwise, and what differs by layer."""
    differences = []
    for field, value in required.items():
        owners = config.layers if hasattr(config.layers[0], field) else (config,)
        if any(getattr(owner, field) != value for owner in owners):
            differences.append(f"{field} is not {value}")
    for field in ("n_kv_head", "head_dim", "rope_theta"):
        if field not in required and len({getattr(layer, field) for layer in config.layers}) > 1:
            differences.append(f"{field} differs between layers")
    return differences


_GPT2_LINEAR = {
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


class GPT2(Architecture):
    """GPT-2 in all four sizes: learned positions, layer norms, tanh GELU, biases, a tied head."""

    prefix = "transformer."
    ignored_suffixes = (".attn.bias", ".attn.masked_bias")

    def read_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        require_values(
            hf_config,
            {
                "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
                "tie_word_embeddings": (True,),
            },
        )
        return {
            "vocab_size": hf_config["vocab_size"],
            "block_size": hf_config["n_positions"],
            "n_layer": hf_config["n_layer"],
            "n_head": hf_config["n_head"],
            "n_embd": hf_config["n_embd"],
            "ffn_dim": hf_config.get("n_inner") or 4 * hf_config["n_embd"],
            "norm_eps": hf_config["layer_norm_epsilon"],
        }

    def incompatibilities(self, config: ModelConfig) -> list[str]:
        required = {
            "position": "learned",
            "norm": "layernorm",
            "mlp": "gelu",
            "bias": True,
            "tie_embeddings": True,
            "n_kv_head": config.n_head,
            "head_dim": config.n_embd // config.n_head,
            "kv": "separate",
            "sink": "none",
            "sink_tokens": 0,
            "window": None,
            "kv_owners": tuple(range(config.n_layer)),
        }
        return _list_differences(config, required)

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",
            "vocab_size": config.vocab_size,
            "n_positions": config.block_size,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.n_embd,
            "n_inner": config.ffn_dim,
            "layer_norm_epsilon": config.norm_eps,
            "tie_word_embeddings": True,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }

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


_ROTATED = {"position": "rope", "rotary_share": 1.0}


class Llama(Architecture):
    """Llama: rotary positions, RMS norms, SwiGLU, grouped queries, no biases."""

    prefix = "model."
    ignored_suffixes = (".rotary_emb.inv_freq",)

    def read_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        supported = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}
        require_values(hf_config, supported)
        n_head = hf_config["num_attention_heads"]
        return {
            "vocab_size": hf_config["vocab_size"],
            "block_size": hf_config["max_position_embeddings"],
            "n_layer": hf_config["num_hidden_layers"],
            "n_head": n_head,
            "n_kv_head": hf_config.get("num_key_value_heads") or n_head,
            "n_embd": hf_config["hidden_size"],
            "head_dim": hf_config.get("head_dim") or hf_config["hidden_size"] // n_head,
            "ffn_dim": hf_config["intermediate_size"],
            "position": "rope",
            "rope_theta": float(_read_rope_theta(hf_config)),
            "norm": "rmsnorm",
            "norm_eps": hf_config["rms_norm_eps"],
            "mlp": "swiglu",
            "bias": False,
            "tie_embeddings": bool(hf_config.get("tie_word_embeddings", False)),
        }

    def incompatibilities(self, config: ModelConfig) -> list[str]:
        required = {
            "norm": "rmsnorm",
            "mlp": "swiglu",
            "bias": False,
            "kv": "separate",
            "sink": "none",
            "sink_tokens": 0,
            "kv_owners": tuple(range(config.n_layer)),
        }
        return self.layer_incompatibilities(config) + _list_differences(config, required)

    def layer_incompatibilities(self, config: ModelConfig) -> list[str]:
        """Return why the positions and windows of layers do not fit; empty if they do."""
        return _list_differences(config, {**_ROTATED, "window": None})

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.block_size,
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": config.n_head,
            "num_key_value_heads": config.layers[0].n_kv_head,
            "hidden_size": config.n_embd,
            "head_dim": config.layers[0].head_dim,
            "intermediate_size": config.ffn_dim,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.layers[0].rope_theta,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": config.layers[0].rope_theta,
            },
            "tie_word_embeddings": config.tie_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
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
            single = {
                "attention.proj": "self_attn.o_proj",
                "mlp.down": "mlp.down_proj",
                "norm1": "input_layernorm",
                "norm2": "post_attention_layernorm",
            }
            yield WeightMapping(f"{block}.attention.qkv.weight", qkv, (q_width, kv_width, kv_width))
            yield WeightMapping(f"{block}.mlp.up.weight", up, (config.ffn_dim, config.ffn_dim))
            for name, hf_name in single.items():
                yield WeightMapping(f"{block}.{name}.weight", (f"{hf_block}.{hf_name}.weight",))


def _read_rope_theta(hf_config: dict[str, Any]) -> float:
    """Return the base of plain rotary embeddings; refuse scaled ones."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise PretrainedError(f"config.json: rope_type = {kind} is not supported; only default is")
    theta: float = rope.get("rope_theta") or hf_config.get("rope_theta") or 10_000.0
    return theta


class Mistral(Llama):
    """Llama with a sliding window of W tokens, the token itself included, in every layer."""

    def read_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        window = hf_config.get("sliding_window")
        local_layers = {} if window is None else {"attention_pattern": "L", "window": window}
        return {**super().read_config(hf_config), **local_layers}

    def layer_incompatibilities(self, config: ModelConfig) -> list[str]:
        windows = {layer.window for layer in config.layers}
        problems = _list_differences(config, _ROTATED)
        if None in windows:
            problems.append("some layers are global")
        elif len(windows) > 1:
            problems.append("window differs between layers")
        return problems

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        hf_config = super().write_config(config)
        for key in ("attention_bias", "mlp_bias"):
            del hf_config[key]
        return {
            **hf_config,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": config.layers[0].window,
        }


class DeepSeekV2(Llama):
    """DeepSeek-V2 (arXiv 2405.04434) with dense layers alone: Llama with latent attention.

    Its rotary dimensions are pairs of neighbours after the others of a head. Here they come first,
    each pair half of them apart. K and V of a head are neighbours in its map from the latent.
    """

    LATENT_NORM_EPS = 1e-6
    """Of the latents' norm in `transformers`, whatever ``rms_norm_eps`` is."""

    def read_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        head_dim, layers = hf_config["qk_nope_head_dim"], hf_config["num_hidden_layers"]
        require_values(
            hf_config,
            {
                "v_head_dim": (head_dim,),
                "num_key_value_heads": (hf_config["num_attention_heads"],),
                "rms_norm_eps": (self.LATENT_NORM_EPS,),
            },
        )
        if hf_config.get("first_k_dense_replace", 0) < layers:
            text = f"first_k_dense_replace = {hf_config.get('first_k_dense_replace', 0)} makes"
            text = f"{text} layers with mixtures of experts, which are not supported"
            raise PretrainedError(
                f"config.json: {text}; only {layers}, the layers of the model, is"
            )
        kv = {
            "latent": hf_config["kv_lora_rank"],
            "rotary": hf_config["qk_rope_head_dim"],
            "query": hf_config["q_lora_rank"],
        }
        return {**super().read_config(hf_config), "head_dim": head_dim, "kv": kv}

    def incompatibilities(self, config: ModelConfig) -> list[str]:
        problems = super().incompatibilities(config)
        if isinstance(config.kv, LatentKV) and config.kv.groups == 1:
            problems.remove("kv is not separate")
            return problems + _list_differences(config, {"norm_eps": self.LATENT_NORM_EPS})
        return [*problems, "kv is not one latent"]

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config.kv, LatentKV)
        return {
            **super().write_config(config),
            "model_type": "deepseek_v2",
            "architectures": ["DeepseekV2ForCausalLM"],
            "num_key_value_heads": config.n_head,
            "q_lora_rank": config.kv.query,
            "kv_lora_rank": config.kv.latent,
            "qk_nope_head_dim": config.head_dim,
            "qk_rope_head_dim": config.kv.rotary,
            "v_head_dim": config.head_dim,
            "head_dim": config.kv.rotary,  # of the rotary frequencies
            "first_k_dense_replace": config.n_layer,
        }

    def iter_weights(self, config: ModelConfig) -> Iterator[WeightMapping]:
        assert isinstance(config.kv, LatentKV)
        latent, rotary, head_dim = config.kv.latent, config.kv.rotary, config.head_dim
        pairs = [*range(0, rotary, 2), *range(1, rotary, 2)]
        q = [*(head_dim + row for row in pairs), *range(head_dim)]
        q_width, key_dim = config.n_head * (head_dim + rotary), head_dim + rotary
        q_order = [head * key_dim + row for head in range(config.n_head) for row in q]
        q_rows = config.kv.query or q_width
        qkv_order = [*range(q_rows)] if config.kv.query else q_order
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
            if config.kv.query:
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


class SmolLM3(Llama):
    """Llama with layers that do not rotate, and with windows in some layers."""

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

    def layer_incompatibilities(self, config: ModelConfig) -> list[str]:
        problems = []
        if any(layer.position not in ("rope", "none") for layer in config.layers):
            problems.append("position is not rope or none")
        if any(layer.rotary_dim not in (0, layer.head_dim) for layer in config.layers):
            problems.append("rotary_share is not 0 or 1")
        if len({layer.window for layer in config.layers} - {None}) > 1:
            problems.append("window differs between local layers")
        return problems

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        windows = [layer.window for layer in config.layers]
        types = ["full_attention" if w is None else "sliding_attention" for w in windows]
        return {
            **super().write_config(config),
            "model_type": "smollm3",
            "architectures": ["SmolLM3ForCausalLM"],
            "no_rope_layers": [int(layer.rotary_dim > 0) for layer in config.layers],
            "layer_types": types,
            "use_sliding_window": any(windows),
            "sliding_window": max(filter(None, windows), default=None),
            "pad_token_id": None,  # the default is of another tokenizer
        }


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": GPT2(),
    "llama": Llama(),
    "mistral": Mistral(),
    "deepseek_v2": DeepSeekV2(),
    "smollm3": SmolLM3(),
}
