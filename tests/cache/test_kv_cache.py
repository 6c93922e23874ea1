"""Slots of a cache: rows that go on apart, and sinks, to the byte."""

import pytest
import torch

from kvlab.cache.uncached_passes import TreePass
from kvlab.layout import KVLayout
from kvlab.model.generate import StaticDecoder
from kvlab.spec import ModelConfig, ServingConfig
from tests.contracts.slot_contract import check_copies_of_rows
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 29, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32,
         "block_size": 64, "position": "rope"}  # fmt: skip
GLOBAL = ModelConfig(**SHAPE)
HYBRID = ModelConfig(**SHAPE, attention_pattern="GLL", window=6)
SINKS = ModelConfig(**SHAPE, attention_pattern="GLL", window=6, sink_tokens=3, sink="learned")
COUNT = 40
WORDS = torch.randint(0, 29, (2, COUNT), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("config", [GLOBAL, HYBRID])
def test_copies_of_rows_of_other_lengths_go_on_as_each_alone(config):
    check_copies_of_rows(config, ServingConfig())


def test_sink_tokens_have_entries_of_their_own():
    """A ring of six beside three sinks; 20 tokens leave 11 of them behind."""
    cache, layout = random_model(SINKS).new_cache(2, 20), KVLayout.of(SINKS)
    assert cache.nbytes == layout.stored_bytes(2, 20, "float64") == 2 * (20 + 2 * 9) * 256
    positions = cache.buffers[1].stored_positions(torch.tensor([20, 7]))
    assert sorted(positions[0].tolist()) == [0, 1, 2, 14, 15, 16, 17, 18, 19]
    assert sorted(positions[1].tolist()) == [-1, -1, 0, 1, 2, 3, 4, 5, 6]


def test_a_static_step_and_a_tree_see_the_sinks():
    model, words = random_model(SINKS), WORDS[:1, :30]
    cache = model.new_cache(1, 40)
    model(words[:, :1], cache=cache)
    decoder = StaticDecoder(model, cache)
    with torch.no_grad():
        steps = torch.stack([decoder(words[:, i]) for i in range(1, 30)], 1)
        expected = model(words)
        assert (steps - expected[:, 1:]).abs().max() < 1e-10
        positions, branches = torch.arange(30)[None], torch.tensor([[0] * 10 + [1] * 20])
        tree = TreePass(SINKS.kv_owners, SINKS.layers, positions, branches, torch.float64)
        whole = model.compute_logits(model.run_pass(words, tree))
    assert (whole - expected).abs().max() < 1e-10
