"""What every K/V form must do. A member's tests inherit `KVFormContract`."""

from importlib import import_module

import pytest

from kvlab.layout import KVLayout, decode_flops, forward_flops
from kvlab.model import GPT
from kvlab.own_extensions import find_members
from kvlab.spec import ModelConfig, ServingConfig
from tests.support.extensions import find_missing, needs


def _find_checks():
    """Return what `kvlab check` asks of a form; nothing where that is deleted."""
    if find_missing("check"):
        return {}
    return import_module("kvlab.extensions.check.member_checks").CHECKS


CHECKS = _find_checks()
SHAPE = {"vocab_size": 41, "block_size": 32, "n_layer": 3, "n_head": 4, "n_embd": 32,
         "position": "rope", "attention_pattern": "GLL", "window": 7}  # fmt: skip
SERVINGS = [{}, {"kv_dtype": "int8"}, {"tie": "adjacent:2"},
            *({key: value} for key, value in find_members("checked_servings").items())]  # fmt: skip


class KVFormContract:
    """Give `changes` to a model, and `numbers` that a token stores in one of its layers."""

    changes: dict
    numbers: int

    def config(self, **more):
        return ModelConfig(**{**SHAPE, **self.changes, **more})

    def test_a_token_stores_as_many_numbers_as_is_said(self):
        assert KVLayout.of(self.config()).plans[0].token_bytes("float32") == 4 * self.numbers

    @pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
    def test_it_holds(self, check):
        check(self.config(), ServingConfig())

    @needs("check")
    @pytest.mark.parametrize("serving", SERVINGS, ids=str)
    def test_a_cache_takes_its_bytes_and_splits_change_nothing(self, serving):
        CHECKS["chunks equal single tokens, in the declared bytes"](
            self.config(), ServingConfig(**serving)
        )

    def test_flops_count_every_weight_and_every_pair(self):
        config = self.config(attention_pattern="G", window=None)
        model, tokens, layer = GPT(config), 30, config.layers[0]
        weights = sum(p.numel() for name, p in model.named_parameters()
                      if p.dim() == 2 and "position" not in name)  # fmt: skip
        heads = 3 * layer.n_head * (layer.key_dim + layer.head_dim)
        assert forward_flops(config, tokens) == tokens * 2 * (weights + heads * tokens)
        attended = 3 * layer.kv_form.flops_per_key(layer) * tokens
        assert decode_flops(config, tokens) == 2 * weights + attended
