"""Slots of a cache: rows that go on apart, sinks and KIVI's blocks, to the byte."""

import pytest
import torch

from kvlab.cache import KVCache
from kvlab.cache.uncached_passes import TreePass
from kvlab.layout import KVLayout
from kvlab.model.generate import StaticDecoder
from kvlab.spec import ModelConfig, ServingConfig
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 29, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32,
         "block_size": 64, "position": "rope"}  # fmt: skip
GLOBAL = ModelConfig(**SHAPE)
HYBRID = ModelConfig(**SHAPE, attention_pattern="GLL", window=6)
SINKS = ModelConfig(**SHAPE, attention_pattern="GLL", window=6, sink_tokens=3, sink="learned")
COUNT = 40
WORDS = torch.randint(0, 29, (2, COUNT), generator=torch.Generator().manual_seed(0))
KIVI2 = ServingConfig(kv_dtype="kivi2", kv_group=8, kv_residual=5)
SERVINGS = [
    ServingConfig(),
    KIVI2,
]


@pytest.mark.parametrize("serving", SERVINGS)
@pytest.mark.parametrize("config", [GLOBAL, HYBRID])
def test_copies_of_rows_of_other_lengths_go_on_as_each_alone(config, serving):
    """In a cache that held other tokens before."""
    model = random_model(config)
    cache = model.new_cache(2, COUNT, serving)
    with torch.inference_mode():
        model(WORDS[:, :33], cache=cache)
        cache.reset()
        model(WORDS[:, :30], cache=cache, lengths=[30, 9])
        copies = cache.select_rows(torch.tensor([1, 0, 1]))
        ends = model(WORDS[[1, 0, 1]][:, 30:36], cache=copies)
        for place, (row, length) in enumerate([(1, 9), (0, 30), (1, 9)]):
            text = torch.cat([WORDS[row, :length], WORDS[row, 30:36]])[None]
            alone = model(text, cache=model.new_cache(1, COUNT, serving))
            assert (ends[place] - alone[0, length:]).abs().max() < 1e-10
    assert cache.list_lengths() == [30, 9], "the original did not move"
    assert 2 * copies.nbytes == 3 * cache.nbytes


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


def test_tokens_are_exact_until_their_block_is_billed_as_codes():
    draw = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 3, 1, 2, 45, 8, generator=draw, dtype=torch.float64)  # as of a model
    layout = KVLayout.of(GLOBAL, KIVI2)
    full = 3 * 2 * 2 * 8 * 8  # layers, K and V, heads, head_dim, bytes of float64
    block = 3 * 2 * (8 * 8 // 4 + 8 * 4 + 8 * (8 // 4 + 4))
    for count in (1, 5, 12, 13, 20, 21, 45):
        cache = KVCache(layout, 1, count, kv.dtype, torch.device("cpu"))
        blocks = max(0, count - 5) // 8
        assert cache.nbytes == layout.stored_bytes(1, count, "float64")
        assert cache.nbytes == blocks * block + min(count, 13) * full
        one_pass = cache.begin_pass(count)
        one_pass.write_kv(0, *kv[:, 0, :, :, :count])
        keys, values = one_pass.read_kv(0).parts
        seen = one_pass.read_kv(0).mask[0, 0, -1]
        assert int(seen.sum()) == count
        exact = kv[:, 0, :, :, :count]
        for part, whole in zip((keys, values), exact, strict=True):
            changed = (part[:, :, seen] != whole).any(-1).any(1)[0]
            assert changed.tolist() == [place < 8 * blocks for place in range(count)]
