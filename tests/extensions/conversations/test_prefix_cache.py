"""The prefix cache between turns: what it takes over, and what it drops."""

import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab.cache import KVCache
from kvlab.errors import CacheError
from kvlab.extensions.conversations.prefix_cache import PrefixCache
from kvlab.extensions.conversations.turns import Turn, run_tokens
from kvlab.layout import KVLayout
from kvlab.spec import ModelConfig, ServingConfig
from tests.studies.prefix_conversations import TRAITS, Session
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 29, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32,
         "block_size": 256, "position": "rope"}  # fmt: skip
GLOBAL = ModelConfig(**SHAPE)
HYBRID = ModelConfig(**SHAPE, attention_pattern="GLL", window=6)
MORE_SESSIONS = 24


def draw_tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 29, (count,), generator=generator).tolist()


def take_turn(model, prefix_cache, prompt, reply=(), serving=None):
    """Run a turn; return its hit and the logits of its prompt."""
    cache = model.new_cache(1, 256, serving)
    run = partial(run_tokens, model, cache)
    turn = Turn(prompt, cache, prefix_cache, run, weights="w")
    logits = turn.prefill()
    turn.tokens += reply
    turn.finish()
    return turn.hit, logits


def fill(config, tokens):
    """Return a cache that holds K and V which are functions of the tokens up to theirs."""
    layout = KVLayout.of(config)
    cache = KVCache(layout, 1, 40, torch.float64, torch.device("cpu"))
    prefixes = [hash(tuple(tokens[: end + 1])) % 10_000 for end in range(len(tokens))]
    values = torch.tensor(prefixes, dtype=torch.float64)[None, None, :, None]
    one_pass = cache.begin_pass(len(tokens), [len(tokens)])
    for layer in range(3):
        parts = [values.expand(1, 2, -1, 8) + 10_000 * (2 * layer + i) for i in range(2)]
        one_pass.write_kv(layer, *parts)
        one_pass.end_layer(layer)
    one_pass.finish()
    return cache


def count_bytes(tensors):
    """Return the bytes of the unique storages."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("number", range(len(TRAITS)))
def test_random_conversations_equal_cold_runs_and_a_plain_reference(number):
    Session(number).run(conversations=2)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_more_random_conversations_equal_cold_runs_and_a_plain_reference():
    for number in range(MORE_SESSIONS):
        Session(number).run()


def test_a_snapshot_is_taken_where_two_texts_part():
    """As that may be common to more: a ring of 6 was at 12 and at 30 tokens before."""
    prefix_cache, text = PrefixCache(10**9), draw_tokens(30)
    for tokens in (text[:12], text):
        prefix_cache.insert(tokens, fill(HYBRID, tokens), weights="w")
    tokens = [*text[:20], 0, 0, 0]
    assert prefix_cache.list_pass_ends(tokens, 12, fill(HYBRID, []), weights="w") == [20, 23]


def test_a_row_is_restored_into_an_empty_one_alone():
    text = draw_tokens(9)
    cache = fill(GLOBAL, text[:5])
    with pytest.raises(CacheError, match="the cache holds 5 tokens; restore"):
        PrefixCache(1).restore(text, cache, weights="w")
    with pytest.raises(CacheError, match="the cache holds 5 tokens, and tokens are 4"):
        PrefixCache(1).insert(text[:4], cache, weights="w")
    with pytest.raises(ValueError, match="bytes_budget = -1 is below 0"):
        PrefixCache(-1)
    with pytest.raises(ValueError, match="snapshot_every = 0 is below 1"):
        PrefixCache(1, snapshot_every=0)


def test_weights_and_layouts_do_not_mix():
    model, prefix_cache = random_model(GLOBAL), PrefixCache(10**9)
    text = draw_tokens(40)
    take_turn(model, prefix_cache, text)
    assert prefix_cache.restore(text, model.new_cache(1, 64), weights="w") == 39, "one is left"
    assert prefix_cache.restore(text[:1], model.new_cache(1, 64), weights="w") == 0
    assert (
        prefix_cache.restore(
            [*text[:17], (text[17] + 1) % 29, 1, 2], model.new_cache(1, 64), weights="w"
        )
        == 17
    )
    assert prefix_cache.restore(text, model.new_cache(1, 64), weights="other") == 0
    for other in (ServingConfig(kv_dtype="int8"), ServingConfig(tie="adjacent:2")):
        assert prefix_cache.restore(text, model.new_cache(1, 64, other), weights="w") == 0


def prepare_change(config):
    """Return a nearly full cache, and a text whose insertion splits a node and evicts others."""
    layout, first = KVLayout.of(config), draw_tokens(30)
    budget = 3 * layout.segment_bytes(0, 24, 40, "float64")
    budget += 3 * layout.snapshot_bytes(24, 40, "float64")
    prefix_cache = PrefixCache(budget, snapshot_every=16)
    for text in (*(draw_tokens(24, seed=seed) for seed in (1, 2)), first[:24]):
        prefix_cache.insert(text, fill(config, text), weights="w")
    return prefix_cache, [*first[:9], *draw_tokens(20, seed=3)]


def test_what_autograd_recorded_is_not_kept():
    model, text = random_model(HYBRID), draw_tokens(20)
    cache, prefix_cache = model.new_cache(1, 40), PrefixCache(10**9)
    model(torch.tensor([text]), cache=cache)
    prefix_cache.insert(text, cache, weights="w")
    assert cache.tensors[0].requires_grad
    assert not any(tensor.requires_grad for tensor in prefix_cache.tensors)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made meanwhile, and some older ones, take at any operation."""

    def __init__(self, tensors, excluded):
        super().__init__()
        self._live = [weakref.ref(tensor) for tensor in tensors]
        self._excluded = {t.untyped_storage().data_ptr() for t in excluded}
        self.peak = 0

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self._live.append(weakref.ref(out))
        live = [tensor for ref in self._live if (tensor := ref()) is not None]
        live = [t for t in live if t.untyped_storage().data_ptr() not in self._excluded]
        self.peak = max(self.peak, count_bytes(live))
        return out


@pytest.mark.parametrize("config", [GLOBAL, HYBRID])
def test_bytes_stay_within_the_budget_in_the_middle_of_an_insertion(config):
    prefix_cache, text = prepare_change(config)
    cache, before = fill(config, text), prefix_cache.evictions
    with LiveBytes(prefix_cache.tensors, cache.tensors) as live:
        prefix_cache.insert(text, cache, weights="w")
    assert prefix_cache.evictions > before, "it had to make room"
    assert prefix_cache.bytes_held <= live.peak <= prefix_cache.bytes_budget
