"""The position schemes of `model.position`: the contract, and a new member."""

import pytest
import torch

from kvlab.errors import SpecError
from kvlab.layout import parameter_count
from kvlab.model import GPT
from kvlab.spec import load_served_model
from kvlab.spec.key_reference import json_schema
from kvlab.spec.layer_config import POSITIONS, PositionScheme
from tests.contracts.position_scheme_contract import PositionSchemeContract


class TestLearned(PositionSchemeContract):
    name = "learned"


class TestRope(PositionSchemeContract):
    name = "rope"


class TestNone(PositionSchemeContract):
    name = "none"
    sees_order = False


def test_every_scheme_of_the_table_has_a_contract_test():
    assert {test.name for test in PositionSchemeContract.__subclasses__()} == set(POSITIONS)


def test_a_new_scheme_is_a_table_line(monkeypatch):
    """Learned and rotary positions at once, by the name that a spec gives."""
    small = {"model.n_layer": 2, "model.n_embd": 48, "model.block_size": 16, "model.vocab_size": 29}
    changes = {**small, "model.position": "learned+rope"}
    with monkeypatch.context() as patched:
        scheme = PositionScheme(has_embedding=True, is_rotary=True)
        patched.setitem(POSITIONS, "learned+rope", scheme)
        config = load_served_model("gpt2", changes).model
        model = GPT(config, seed=0)
        assert sum(p.numel() for p in model.parameters()) == parameter_count(config)
        learned = GPT(config.model_copy(update={"position": "learned"}), seed=0)
        tokens = torch.arange(8)[None]
        assert (model(tokens) - learned(tokens))[:, 1:].abs().max() > 1e-4, "it rotates as well"
        choices = json_schema("experiment")["$defs"]["ModelConfig"]["properties"]["position"]
        assert "learned+rope" in choices["enum"]
    with pytest.raises(SpecError, match=r"model.position = learned\+rope is not one of learned"):
        load_served_model("gpt2", changes)
