"""`model.kinds.X.mixer`: how a layer mixes its tokens, and what that means for weights and FLOPs.

A `Mixer` is arithmetic without torch; `module` names the torch module. Attention is one: what its
tokens store is a K/V form (`kvlab.spec.kv_forms`). Others fold all tokens into a *state* of fixed
size. Specs, layouts, FLOPs and the model ask a layer's mixer, and know none but attention by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from pkgutil import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from kvlab.own_extensions import name_members
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.kv_forms import StoredVectors
from kvlab.spec.members import WHOLE, Member, is_count, name_or_member

if TYPE_CHECKING:
    from kvlab.spec.layer_config import LayerConfig
    from kvlab.spec.model_config import ModelConfig

STATE_DTYPE = "float32"
"""The least precise dtype of a state: every token changes it, and roundings would add up."""


def _are_shapes(_mixer: "Mixer", state: object) -> bool:
    """Return whether a row can have what `Mixer.state` has returned."""
    return isinstance(state, tuple) and all(
        isinstance(shape, tuple) and len(shape) >= 2 and all(is_count(n, 1) for n in shape)
        for shape in state
    )


@dataclass(frozen=True)
class Mixer(Member, ABC):
    """How the tokens of a layer take from earlier ones.

    Attributes:
        letter: the letter of such layers in ``attention_pattern``; empty for none of its own, as
            for those of users' files.
        module: a subclass of `kvlab.model.attention.TokenMixer`, as ``module:class``.
        settings: fields of `LayerKind` that it reads; those of positions and windows are of
            attention alone.
    """

    letter: ClassVar[str] = ""
    module: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ("n_kv_head", "head_dim")
    returns = {
        "state": (
            _are_shapes,
            "a tuple of shapes, each a tuple of two or more whole numbers, such as ((4, 16),)",
        ),
        **dict.fromkeys(("weights", "vectors", "products", "decode_flops", "saved_bytes"), WHOLE),
    }

    def find_definition_problem(self, module: ModuleType, _text: str) -> str | None:
        if not isinstance(self.settings, tuple) or not {*self.settings} <= {*Mixer.settings}:
            hint = f"name keys of model.kinds that it reads, of {', '.join(Mixer.settings)}"
            return f"has settings = {self.settings!r}; {hint}"
        if letter := vars(type(self)).get("letter"):
            hint = "leave it out and define one in YAML, as in"
            return f"has letter = {letter!r}; {hint} kinds: {{M: {{mixer: {self.name}}}}}"
        return self.find_place_problem(module, "module")

    def stored(self, layer: "LayerConfig") -> tuple[StoredVectors, ...]:  # noqa: ARG002
        """Return what one token stores in the layer's cache slot; nothing beside a state."""
        return ()

    def state(self, layer: "LayerConfig") -> tuple[tuple[int, ...], ...]:  # noqa: ARG002
        """Return the shapes of the tensors that a row stores, however many tokens it has.

        Each has two dimensions or more. A layer that stores tokens has none.
        """
        return ()

    def state_dtype(self, dtype: str) -> str:
        """Return the dtype of the state of a model of ``dtype``."""
        return max(dtype, STATE_DTYPE, key=lambda name: DTYPES[name].item_bytes)

    def state_bytes(self, layer: "LayerConfig", dtype: str) -> int:
        """Return the bytes of the state of one row."""
        return sum(map(prod, self.state(layer))) * DTYPES[self.state_dtype(dtype)].item_bytes

    @abstractmethod
    def weights(self, model: "ModelConfig", number: int) -> int:
        """Return the weights of layer ``number`` that multiply every token."""

    @abstractmethod
    def vectors(self, model: "ModelConfig", number: int) -> int:
        """Return the parameters of the layer beside `weights`: biases, norms, scales."""

    @abstractmethod
    def products(self, layer: "LayerConfig", tokens: int) -> int:
        """Return the multiply-adds beside those of weights, for each of ``tokens`` of a text."""

    @abstractmethod
    def decode_flops(self, layer: "LayerConfig", seen: int) -> int:
        """Return the FLOPs beside those of weights to decode a token that sees ``seen``."""

    @abstractmethod
    def saved_bytes(self, layer: "LayerConfig", tokens: int, item_bytes: int) -> int:
        """Return the bytes that a token keeps for the backward pass, beside the layer's norms.

        Args:
            tokens: of its text.
            item_bytes: of a number in the training's precision.
        """


@dataclass(frozen=True)
class AttentionMixer(Mixer):
    """Attention: a token takes from those that it sees by its query and their keys."""

    module = "kvlab.model.attention:Attention"
    settings = (*Mixer.settings, "position", "rope_theta", "rotary_share", "rope_scaling", "window")

    def stored(self, layer: "LayerConfig") -> tuple[StoredVectors, ...]:
        return layer.kv_form.stored(layer)

    def _qkv_width(self, model: "ModelConfig", number: int) -> int:
        layer, is_owner = model.layers[number], model.kv_owners[number] == number
        return layer.q_rows + (layer.store_width if is_owner else 0)

    def weights(self, model: "ModelConfig", number: int) -> int:
        layer, outputs = model.layers[number], self._qkv_width(model, number)
        return model.n_embd * (outputs + layer.out_width) + layer.kv_form.up_weights(layer)

    def vectors(self, model: "ModelConfig", number: int) -> int:
        layer, is_owner = model.layers[number], model.kv_owners[number] == number
        total = self._qkv_width(model, number) + model.n_embd if model.bias else 0
        total += layer.query_dim + (layer.kv_form.norm_weights() if is_owner else 0)
        total += layer.head_dim * (1 + is_owner) if layer.has_qk_norm else 0
        return total + (layer.n_head if layer.has_sink else 0)

    def products(self, layer: "LayerConfig", tokens: int) -> int:
        return layer.n_head * (layer.key_dim + layer.head_dim) * layer.visible_tokens(tokens)

    def decode_flops(self, layer: "LayerConfig", seen: int) -> int:
        return layer.kv_form.flops_per_key(layer) * seen

    def saved_bytes(self, layer: "LayerConfig", tokens: int, item_bytes: int) -> int:  # noqa: ARG002
        """Return those of q, k, v, the output, and what they are made from."""
        values = 2 * (layer.q_width + layer.out_width) + layer.query_dim
        values += 0 if layer.kv_form.stores_keys else layer.store_width
        if layer.has_qk_norm:
            values += layer.q_width + layer.n_kv_head * layer.head_dim
        return item_bytes * values


ATTENTION = AttentionMixer()

MIXERS: dict[str, str] = {
    "attention": "kvlab.spec.mixers:ATTENTION",
    **name_members("mixers"),
}
"""`mixer` -> where its object is, as ``module:object``: the one table of mixers."""


def find_mixer(named: str | Mixer) -> Mixer:
    """Return a member of `MIXERS` by its name, or one of a user's file as it is."""
    return _load(MIXERS[named]) if isinstance(named, str) else named


_load: Callable[[str], Mixer] = cache(resolve_name)


def list_letters() -> dict[str, str]:
    """Return the mixers that have a letter of their own, by it."""
    letters = {find_mixer(name).letter: name for name in MIXERS}
    return {letter: name for letter, name in letters.items() if letter}


if TYPE_CHECKING:
    MixerField = str | Mixer
else:
    MixerField = name_or_member(Mixer, lambda: MIXERS)
