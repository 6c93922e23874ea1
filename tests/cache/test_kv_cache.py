"""Prefix reuse and copies of rows."""

import pytest
import torch

from kvlab.cache.uncached_passes import TreePass
from kvlab.errors import CacheError
from kvlab.layout import KVLayout
from kvlab.model.generate import StaticDecoder
from kvlab.spec import ModelConfig
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 29, "n_layer": 6, "n_head": 4, "n_kv_head": 2, "n_embd": 32,
         "block_size": 64, "position": "rope"}  # fmt: skip
GLOBAL = ModelConfig(**SHAPE)
HYBRID = ModelConfig(**SHAPE, attention_pattern="GLL", window=6)


def text(rows=1, count=30, seed=0):
    return torch.randint(0, 29, (rows, count), generator=torch.Generator().manual_seed(seed))


def test_cropping_reuses_a_prefix():
    model = random_model(GLOBAL)
    first, second = text(seed=1), text(seed=2)
    second[:, :12] = first[:, :12]
    cache = model.new_cache(1, 40)
    model(first, cache=cache)
    cache.crop(12)
    assert cache.length == 12
    again = model(second[:, 12:], cache=cache)
    assert (again - model(second)[:, 12:]).abs().max() < 1e-10


def test_cropping_a_ring_works_until_it_has_dropped_what_is_needed():
    model, words = random_model(HYBRID), text()
    cache = model.new_cache(1, 40)
    model(words[:, :6], cache=cache)  # six tokens: the ring of six has dropped none
    cache.crop(2)
    again = model(words[:, 2:], cache=cache)
    assert (again - model(words)[:, 2:]).abs().max() < 1e-10
    cache.crop(29)  # the last token alone can always go
    assert (model(words[:, 29:], cache=cache) - model(words)[:, 29:]).abs().max() < 1e-10
    with pytest.raises(CacheError, match="keeps the last 6 of 30 tokens"):
        cache.crop(28)
    with pytest.raises(CacheError, match="rows hold 30 tokens"):
        cache.crop(31)
    cache.reset()
    assert (model(words, cache=cache) - model(words)).abs().max() < 1e-10


@pytest.mark.parametrize("config", [GLOBAL, HYBRID])
def test_repeated_rows_go_on_apart(config):
    model, words = random_model(config), text(rows=2, count=9)
    cache = model.new_cache(2, 20)
    model(words, cache=cache, lengths=[9, 4])
    wide = cache.select_rows(torch.arange(cache.batch_size).repeat_interleave(3))
    ends = text(rows=6, count=5, seed=3)
    out = model(ends, cache=wide)
    for row in range(6):
        start = words[row // 3, : (9, 4)[row // 3]]
        whole = model(torch.cat([start, ends[row]])[None])
        assert (out[row] - whole[0, len(start) :]).abs().max() < 1e-10
    assert cache.length == 9  # the original did not move
    assert wide.nbytes == 3 * cache.nbytes


SINKS = ModelConfig(**SHAPE, attention_pattern="GLL", window=6, sink_tokens=3, sink="learned")


def test_sink_tokens_have_entries_of_their_own():
    """A ring of six beside three sinks; 20 tokens leave 11 of them behind."""
    cache, layout = random_model(SINKS).new_cache(2, 20), KVLayout.of(SINKS)
    assert cache.nbytes == layout.stored_bytes(2, 20, "float64") == 2 * (2 * 20 + 4 * 9) * 256
    positions = cache.buffers[1].stored_positions(torch.tensor([20, 7]))
    assert sorted(positions[0].tolist()) == [0, 1, 2, 14, 15, 16, 17, 18, 19]
    assert sorted(positions[1].tolist()) == [-1, -1, 0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("start", [2, 3, 7, 9, 29])
def test_a_ring_with_sinks_is_cropped_where_it_holds_what_is_seen(start):
    model, words = random_model(SINKS), text()
    cache = model.new_cache(1, 40)
    model(words[:, : start + 1], cache=cache)
    cache.crop(start)
    again = model(words[:, start:], cache=cache)
    assert (again - model(words)[:, start:]).abs().max() < 1e-10
    with pytest.raises(CacheError, match="keeps the first 3 and the last 6 of 30 tokens"):
        cache.crop(20)
    cache.crop(2)  # which the sinks hold
    assert (model(words[:, 2:], cache=cache) - model(words)[:, 2:]).abs().max() < 1e-10


def test_a_static_step_and_a_tree_see_the_sinks():
    model, words = random_model(SINKS), text()
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
