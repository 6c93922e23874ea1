"""The mixers of `model.kinds.X.mixer`: a new member, and what a letter means."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from kvlab.errors import SpecError
from kvlab.model.attention import TokenMixer
from kvlab.model.uptraining import initialize_from
from kvlab.spec import ModelConfig, load_served_model, mixers
from kvlab.spec.key_reference import json_schema
from kvlab.spec.mixers import MIXERS, Mixer
from tests.contracts.mixer_contract import MixerContract
from tests.support.random_model import random_model


@dataclass(frozen=True)
class HalvesMixer(Mixer):
    """A token takes from each earlier one half as much as the next token does."""

    letter = "H"
    module = "tests.model.test_mixers:Halves"
    settings = ()

    def state(self, layer):
        return ((1, 1, layer.out_width),)

    def weights(self, model, number):
        return model.n_embd * model.layers[number].out_width * 2

    def vectors(self, model, number):  # noqa: ARG002
        return 0

    def products(self, layer, tokens):  # noqa: ARG002
        return layer.out_width

    def decode_flops(self, layer, seen):  # noqa: ARG002
        return 2 * layer.out_width

    def saved_bytes(self, layer, tokens, item_bytes):  # noqa: ARG002
        return 2 * item_bytes * layer.out_width


class Halves(TokenMixer):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, width = layer, config.layers[layer].out_width
        self.value = nn.Linear(config.n_embd, width, bias=False)
        self.proj = nn.Linear(width, config.n_embd, bias=False)

    def forward(self, x, attention_pass, rotation):  # noqa: ARG002
        values, context = self.value(x), attention_pass.read_kv(self.layer)
        state = context.parts[0][:, 0, 0] if context.parts else torch.zeros_like(values[:, 0])
        ids = context.documents.ids if context.documents else None
        out = []
        for i, value in enumerate(values.unbind(1)):
            after = state / 2 + value
            if ids is not None and i and (ids[:, i] != ids[:, i - 1]).any():
                after = torch.where((ids[:, i] != ids[:, i - 1])[:, None], value, after)
            is_real = None if context.is_real is None else context.is_real[:, i, None]
            state = after if is_real is None else torch.where(is_real, after, state)
            out.append(state)
        if context.parts:
            attention_pass.write_kv(self.layer, state[:, None, None])
        attention_pass.end_layer(self.layer)
        return self.proj(torch.stack(out, 1))


MIXER = HalvesMixer()


class TestANewMixerIsATableLine(MixerContract):
    name = "halves"

    @pytest.fixture(autouse=True)
    def member(self, monkeypatch):
        monkeypatch.setitem(MIXERS, "halves", "tests.model.test_mixers:MIXER")

    def test_its_letter_needs_no_settings(self):
        config = ModelConfig(n_layer=4, n_head=2, n_embd=8, attention_pattern="HG")
        assert [layer.stores_tokens for layer in config.layers] == [False, True, False, True]
        same = ModelConfig(
            n_layer=4, n_head=2, n_embd=8, attention_pattern="MG", kinds={"M": {"mixer": "halves"}}
        )
        attention = ModelConfig(n_layer=4, n_head=2, n_embd=8)
        assert config.computation() == same.computation() != attention.computation()
        json.dumps(config.computation())

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"kinds.H.n_kv_head": 1}, "kinds.H.mixer is missing: H without settings is halves;"
             " write mixer: halves or attention"),
            ({"kinds.H": {"mixer": "halve"}}, "halve is not one of attention, .*halves"),
            ({"kinds.H": {"mixer": "halves", "n_kv_head": 1}}, "is not read by mixer halves"),
            ({"global.mixer": "halves"}, "cannot change what G is; use kinds: {M: {mixer: halves}}"),
        ],
    )  # fmt: skip
    def test_what_its_letter_means_is_never_guessed(self, changes, message):
        changes = {f"model.{key}": value for key, value in changes.items()}
        with pytest.raises(SpecError, match=message):
            load_served_model("gpt2", {"model.attention_pattern": "HG", **changes})

    def test_a_schema_and_uptraining_know_it(self):
        kind = json_schema("experiment")["$defs"]["LayerKind"]["properties"]["mixer"]
        assert "halves" in json.dumps(kind)
        source = random_model(self.config("G", kinds={}))
        model = random_model(self.config("HGGG", kinds={}))
        conversion = initialize_from(model, source.config, dict(source.named_parameters()))
        assert "mixes" in conversion.fresh["blocks.0.attention.proj.weight"]
        assert "blocks.1.attention.proj.weight" in conversion.copied


def test_attention_is_the_mixer_of_layers_that_name_none():
    config = ModelConfig(n_layer=2, n_head=2, n_embd=8)
    assert {layer.mixer for layer in config.layers} == {mixers.ATTENTION}
