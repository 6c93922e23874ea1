"""The prefix cache between turns: what it takes over, byte for byte, and what it drops first."""

import pytest
import torch

from kvlab.cache import PrefixCache
from kvlab.errors import CacheError
from kvlab.model.turns import Turn
from kvlab.spec import ModelConfig, ServingConfig
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 29, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32,
         "block_size": 256, "position": "rope"}  # fmt: skip
GLOBAL = ModelConfig(**SHAPE)
HYBRID = ModelConfig(**SHAPE, attention_pattern="GLL", window=6)


def draw_tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 29, (count,), generator=generator).tolist()


def take_turn(model, prefix_cache, prompt, reply=(), serving=None):
    """Run a turn; return its hit and the logits of its prompt."""
    cache = model.new_cache(1, 256, serving)
    turn = Turn(model, prompt, cache, prefix_cache, weights="w")
    logits = turn.prefill()
    turn.tokens += reply
    turn.finish()
    return turn.hit, logits


@pytest.mark.parametrize("config", [GLOBAL, HYBRID])
def test_a_reply_is_part_of_what_the_next_turn_takes_over(config):
    model, prefix_cache = random_model(config), PrefixCache(10**9)
    text = draw_tokens(200)
    assert take_turn(model, prefix_cache, text[:100], text[100:150])[0] == 0
    hit, logits = take_turn(model, prefix_cache, text)
    assert hit == 150
    assert (logits - model(torch.tensor([text]))[:, -1]).abs().max() < 1e-10


def test_a_row_is_restored_into_an_empty_one_alone():
    model, prefix_cache = random_model(GLOBAL), PrefixCache(10**9)
    cache = model.new_cache(1, 16)
    model(torch.tensor([draw_tokens(5)]), cache=cache)
    with pytest.raises(CacheError, match="row = 0 holds tokens already"):
        prefix_cache.restore(draw_tokens(9), cache, weights="w")
    with pytest.raises(CacheError, match="row = 0 holds 5 tokens, and tokens are 4"):
        prefix_cache.insert(draw_tokens(4), cache, weights="w")


def test_weights_and_layouts_do_not_mix():
    model, prefix_cache = random_model(GLOBAL), PrefixCache(10**9)
    text = draw_tokens(40)
    take_turn(model, prefix_cache, text)
    assert prefix_cache.restore(text, model.new_cache(1, 64), weights="w") == 39
    assert prefix_cache.restore(text, model.new_cache(1, 64), weights="other") == 0
    int8 = ServingConfig(kv_dtype="int8")
    assert prefix_cache.restore(text, model.new_cache(1, 64, int8), weights="w") == 0
