"""The contract of a published architecture: Hugging Face's names and shapes against ours."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvlab.errors import PretrainedError
from kvlab.spec.model_config import ModelConfig


@dataclass(frozen=True)
class WeightMapping:
    """One of our parameters as theirs: put below each other along the output dimension.

    Attributes:
        ours: our parameter's name.
        theirs: their tensors' names, in the order of our rows.
        rows: how many of our rows each of theirs holds; one entry a name.
        turned: theirs stand as (inputs, outputs), as GPT-2's Conv1D keeps them.
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    turned: bool = False


class Architecture(ABC):
    """One value of ``model_type`` in a Hugging Face ``config.json``."""

    prefix: str
    """What their names start with in a language model's checkpoint; a bare one leaves it out."""

    ignored: tuple[str, ...] = ()
    """Endings of tensors in checkpoints that are no weights (masks, frequencies)."""

    @abstractmethod
    def read_config(self, theirs: dict[str, Any]) -> dict[str, Any]:
        """Our model's fields.

        Raises:
            PretrainedError: the checkpoint uses something that our model does not have.
        """

    @abstractmethod
    def write_config(self, ours: ModelConfig) -> dict[str, Any]:
        """Their configuration of a model that `misfits` does not object to."""

    @abstractmethod
    def misfits(self, ours: ModelConfig) -> list[str]:
        """Why our model cannot be written as this architecture; empty if it can."""

    @abstractmethod
    def weights(self, ours: ModelConfig) -> Iterator[WeightMapping]:
        """Every parameter of our model."""


def require_values(theirs: dict[str, Any], wanted: dict[str, tuple[Any, ...]]) -> None:
    """Raises PretrainedError unless every key has one of the values that we can compute."""
    for key, values in wanted.items():
        value = theirs.get(key, values[0])
        if value not in values:
            usable = " or ".join(map(str, values))
            raise PretrainedError(
                f"config.json: {key} = {value} is not supported; only {usable} is"
            )


# GPT-2, all four sizes: learned positions, layer norms, tanh GELU, biases, a tied head.


_GPT2_LINEAR = {
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


class GPT2(Architecture):
    prefix = "transformer."
    ignored = (".attn.bias", ".attn.masked_bias")

    def read_config(self, theirs: dict[str, Any]) -> dict[str, Any]:
        require_values(
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

    def weights(self, ours: ModelConfig) -> Iterator[WeightMapping]:
        yield WeightMapping("token_embedding.weight", ("transformer.wte.weight",))
        yield WeightMapping("position_embedding.weight", ("transformer.wpe.weight",))
        norms = {"norm": "transformer.ln_f"}
        for layer in range(ours.n_layer):
            norms[f"blocks.{layer}.norm1"] = f"transformer.h.{layer}.ln_1"
            norms[f"blocks.{layer}.norm2"] = f"transformer.h.{layer}.ln_2"
            for mine, name in _GPT2_LINEAR.items():
                own, their = f"blocks.{layer}.{mine}", f"transformer.h.{layer}.{name}"
                yield WeightMapping(f"{own}.weight", (f"{their}.weight",), turned=True)
                yield WeightMapping(f"{own}.bias", (f"{their}.bias",))
        for mine, name in norms.items():
            for part in ("weight", "bias"):
                yield WeightMapping(f"{mine}.{part}", (f"{name}.{part}",))


# Llama: rotary positions, RMS norms, SwiGLU, grouped queries, no biases.


class Llama(Architecture):
    prefix = "model."
    ignored = (".rotary_emb.inv_freq",)

    def read_config(self, theirs: dict[str, Any]) -> dict[str, Any]:
        require_values(
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

    def weights(self, ours: ModelConfig) -> Iterator[WeightMapping]:
        queries, keys = ours.n_head * ours.head_dim, ours.n_kv_head * ours.head_dim
        yield WeightMapping("token_embedding.weight", ("model.embed_tokens.weight",))
        yield WeightMapping("norm.weight", ("model.norm.weight",))
        if not ours.tie_embeddings:
            yield WeightMapping("lm_head.weight", ("lm_head.weight",))
        for layer in range(ours.n_layer):
            own, their = f"blocks.{layer}.", f"model.layers.{layer}."
            qkv = tuple(f"{their}self_attn.{part}_proj.weight" for part in "qkv")
            up = tuple(f"{their}mlp.{part}_proj.weight" for part in ("gate", "up"))
            yield WeightMapping(f"{own}attention.qkv.weight", qkv, (queries, keys, keys))
            yield WeightMapping(f"{own}attention.proj.weight", (f"{their}self_attn.o_proj.weight",))
            yield WeightMapping(f"{own}mlp.up.weight", up, (ours.ffn_dim, ours.ffn_dim))
            yield WeightMapping(f"{own}mlp.down.weight", (f"{their}mlp.down_proj.weight",))
            yield WeightMapping(f"{own}norm1.weight", (f"{their}input_layernorm.weight",))
            yield WeightMapping(f"{own}norm2.weight", (f"{their}post_attention_layernorm.weight",))


def _rope_theta(theirs: dict[str, Any]) -> float:
    """The base of plain rotary embeddings; scaled ones are refused."""
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise PretrainedError(f"config.json: rope_type = {kind} is not supported; only default is")
    theta: float = rope.get("rope_theta") or theirs.get("rope_theta") or 10_000.0
    return theta


# Mistral: Llama whose every layer sees a sliding window (of W tokens, itself included).


class Mistral(Llama):
    def read_config(self, theirs: dict[str, Any]) -> dict[str, Any]:
        window = theirs.get("sliding_window")
        horizon = {} if window is None else {"attention_pattern": "L", "window": window}
        return {**super().read_config(theirs), **horizon}

    def window_misfits(self, ours: ModelConfig) -> list[str]:
        return [] if set(ours.layer_kinds) == {"L"} else ["some layers are global"]

    def write_config(self, ours: ModelConfig) -> dict[str, Any]:
        theirs = super().write_config(ours)
        for key in ("attention_bias", "mlp_bias"):
            del theirs[key]
        return {
            **theirs,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": ours.window,
        }


# The published architectures, by their ``model_type``.


ARCHITECTURES: dict[str, Architecture] = {"gpt2": GPT2(), "llama": Llama(), "mistral": Mistral()}
