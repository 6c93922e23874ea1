"""The mixers of `model.kinds.X.mixer`: a new member, and what a letter means."""

import json
from pathlib import Path
from runpy import run_path

import pytest

from kvlab.errors import SpecError
from kvlab.model.uptraining import initialize_from
from kvlab.spec import ModelConfig, load_served_model, mixers
from kvlab.spec.experiment import Experiment
from kvlab.spec.mixers import MIXERS
from tests.contracts.mixer_contract import MixerContract
from tests.support.random_model import random_model

EXAMPLE = run_path(str(Path(__file__).parents[2] / "docs" / "extend" / "decayed_sum.py"))
Module = EXAMPLE["DecayedSumModule"]


class DecayedSum(EXAMPLE["DecayedSum"]):
    """The example of the page, with a letter of its own."""

    letter = "H"
    module = "tests.model.test_mixers:Module"


MIXER = DecayedSum()


class TestANewMixerIsATableLine(MixerContract):
    name = "decayed_sum"

    @pytest.fixture(autouse=True)
    def member(self, monkeypatch):
        monkeypatch.setitem(MIXERS, "decayed_sum", "tests.model.test_mixers:MIXER")

    def test_its_letter_needs_no_settings(self):
        config = ModelConfig(n_layer=4, n_head=2, n_embd=8, attention_pattern="HG")
        assert [layer.stores_tokens for layer in config.layers] == [False, True, False, True]
        same = ModelConfig(
            n_layer=4, n_head=2, n_embd=8, attention_pattern="MG",
            kinds={"M": {"mixer": "decayed_sum"}},
        )  # fmt: skip
        attention = ModelConfig(n_layer=4, n_head=2, n_embd=8)
        assert config.computation() == same.computation() != attention.computation()
        json.dumps(config.computation())

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"kinds.H.n_kv_head": 1}, "kinds.H.mixer is missing: H without settings is decayed_sum;"
             " write mixer: decayed_sum or attention"),
            ({"kinds.H": {"mixer": "decayed"}}, "decayed is not one of attention, .*decayed_sum"),
            ({"kinds.H": {"mixer": "decayed_sum", "n_kv_head": 1}}, "is not read by mixer decayed_sum"),
            ({"global.mixer": "decayed_sum"}, "cannot change what G is; use kinds: {M: {mixer: decayed_sum}}"),
        ],
    )  # fmt: skip
    def test_what_its_letter_means_is_never_guessed(self, changes, message):
        changes = {f"model.{key}": value for key, value in changes.items()}
        with pytest.raises(SpecError, match=message):
            load_served_model("gpt2", {"model.attention_pattern": "HG", **changes})

    def test_a_schema_and_uptraining_know_it(self):
        kind = Experiment.model_json_schema()["$defs"]["LayerKind"]["properties"]["mixer"]
        assert "decayed_sum" in json.dumps(kind)
        source = random_model(self.config("G", kinds={}))
        model = random_model(self.config("HGGG", kinds={}))
        conversion = initialize_from(model, source.config, dict(source.named_parameters()))
        assert "mixes" in conversion.fresh["blocks.0.attention.proj.weight"]
        assert "blocks.1.attention.proj.weight" in conversion.copied


def test_attention_is_the_mixer_of_layers_that_name_none():
    config = ModelConfig(n_layer=2, n_head=2, n_embd=8)
    assert {layer.mixer for layer in config.layers} == {mixers.ATTENTION}
