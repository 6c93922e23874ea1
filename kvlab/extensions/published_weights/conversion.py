"""What an architecture of Hugging Face is to kvlab, and what their configurations have in common.

The architectures are in `kvlab.extensions.published_weights.architectures`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvlab.errors import PretrainedError
from kvlab.spec.layer_config import LayerConfig
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
        offset: what is added to the tensors to give the parameter.
    """

    name: str
    hf_names: tuple[str, ...]
    rows: tuple[int, ...] = ()
    transposed: bool = False
    order: tuple[int, ...] = ()
    offset: float = 0.0

    def read(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the parameter's values from the checkpoint's tensors."""
        if self.transposed:
            tensors = [tensor.transpose(0, -1) for tensor in tensors]
        value = torch.cat(list(tensors))
        if self.offset:
            value = value.float() + self.offset
        return value[list(self.order)] if len(self.order) == len(value) else value

    def write(self, value: Tensor) -> dict[str, Tensor]:
        """Return the checkpoint's tensors by name from the parameter's values."""
        if self.order:
            value = value[torch.tensor(self.order).argsort()]
        if self.offset:
            value = value - self.offset
        parts = torch.split(value, list(self.rows)) if self.rows else (value,)
        if self.transposed:
            parts = tuple(part.T for part in parts)
        pairs = zip(self.hf_names, parts, strict=True)
        return {name: part.contiguous().clone() for name, part in pairs}


class Architecture(ABC):
    """One value of ``model_type`` in a Hugging Face ``config.json``.

    Attributes:
        model_type: as ``config.json`` has it.
        hf_class: of the language model in `transformers`.
        prefix: what tensor names start with in a language model's checkpoint. The checkpoint of
            a bare model leaves it out.
        ignored_suffixes: endings of tensors that are not weights (masks, frequencies).
        fields: of a `ModelConfig` -> keys of ``config.json``.
        supported: the values that other keys may have; the first is the default, and written.
        constants: fields that every model of this architecture has, beside kvlab's defaults.
    """

    model_type: str
    hf_class: str
    prefix: str
    ignored_suffixes: tuple[str, ...] = ()
    fields: ClassVar[dict[str, str]]
    supported: ClassVar[dict[str, tuple[Any, ...]]]
    constants: ClassVar[dict[str, Any]] = {}

    def read_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a `ModelConfig`.

        Raises:
            PretrainedError: the checkpoint uses something that `GPT` does not have.
        """
        require_values(hf_config, self.supported)
        return self.constants | {field: hf_config[key] for field, key in self.fields.items()}

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """Return Hugging Face's configuration of a model.

        What the architecture does not have is lost. Token ids are left out: they belong to the
        tokenizer.

        Raises:
            PretrainedError: the model has what no configuration can say.
        """
        return {
            "model_type": self.model_type,
            "architectures": [self.hf_class],
            **{key: getattr(config, field) for field, key in self.fields.items()},
            **{key: values[0] for key, values in self.supported.items()},
        }

    @abstractmethod
    def iter_weights(self, config: ModelConfig) -> Iterator[WeightMapping]:
        """Yield the mapping of every parameter of the model."""


def require_values(hf_config: dict[str, Any], supported: dict[str, tuple[Any, ...]]) -> None:
    """Raise PretrainedError unless every key has a supported value; the first is its default."""
    for key, values in supported.items():
        value = hf_config.get(key, values[0])
        if value not in values:
            usable = " or ".join(map(str, values))
            text = f"config.json: {key} = {value} is not supported"
            raise PretrainedError(f"{text}; only {usable} is")


_YARN_TURNS = {"beta_fast": 32, "beta_slow": 1}


def read_rope(
    rope: Mapping[str, Any], theta: float, hf_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the rotary fields of some layers.

    Args:
        rope: the checkpoint's settings for these layers.
        theta: the base if ``rope`` has none.

    Raises:
        PretrainedError: `RopeScaling` does not support the scaling.
    """
    fields: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta") or theta)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return fields
    if kind == "linear":
        return {**fields, "rope_scaling": {"by": "linear", "factor": float(rope["factor"])}}
    if kind != "yarn":
        text = f"config.json: rope_type = {kind} is not supported; only default, linear or yarn is"
        raise PretrainedError(text)
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.get(key):
            raise PretrainedError(f"config.json: {key} of yarn is not supported; leave it out")
    original = rope.get("original_max_position_embeddings") or hf_config["max_position_embeddings"]
    limits = {key: float(rope.get(key) or turns) for key, turns in _YARN_TURNS.items()}
    scaling = {"by": "yarn", "factor": float(rope["factor"]), "original": original, **limits}
    return {**fields, "rope_scaling": {**scaling, "truncate": rope.get("truncate", True)}}


def write_rope(layer: LayerConfig) -> dict[str, Any]:
    """Return a checkpoint's rotary settings for such layers."""
    scaling = layer.rope_scaling
    rope: dict[str, Any] = {"rope_theta": layer.rope_theta}
    if scaling is None:
        return {"rope_type": "default", **rope}
    rope |= {"rope_type": scaling.by, "factor": scaling.factor}
    if scaling.by == "linear":
        return rope
    rope |= {"original_max_position_embeddings": scaling.original, "truncate": scaling.truncate}
    return rope | {key: getattr(scaling, key) for key in _YARN_TURNS}


def read_layer_types(hf_config: Mapping[str, Any], period: int) -> dict[str, Any]:
    """Return the fields of global and local layers; by default every ``period``-th is global."""
    types = hf_config.get("layer_types") or [
        "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
        for layer in range(hf_config["num_hidden_layers"])
    ]
    pattern = "".join("L" if one == "sliding_attention" else "G" for one in types)
    window = hf_config["sliding_window"] if "L" in pattern else None
    return {"attention_pattern": pattern, "window": window}


def write_layer_types(config: ModelConfig) -> dict[str, Any]:
    """Return which layers are local, and their window.

    Without local layers the window is the whole context: Gemma 3 of transformers needs a number.
    """
    windows = [layer.window for layer in config.layers]
    return {
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "sliding_window": max(filter(None, windows), default=config.block_size),
    }
