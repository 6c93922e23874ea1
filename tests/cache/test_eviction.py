"""Eviction: what is kept, whatever the chunks; no eviction where everything fits; exact bytes."""

import pytest
import torch

from kvlab.cache import PrefixCache
from kvlab.cache.eviction import EvictingBuffer
from kvlab.data.batches import spread_windows
from kvlab.errors import CacheError
from kvlab.evaluate.validation_loss import compare_serving
from kvlab.layout import KVLayout
from kvlab.spec import ModelConfig, ServingConfig
from tests.evaluate.test_serving_comparison import SHAPE as SCORED_SHAPE
from tests.evaluate.test_serving_comparison import TEXT
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 29, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32,
         "block_size": 64, "position": "rope"}  # fmt: skip
MODEL = random_model(ModelConfig(**SHAPE))
HYBRID = random_model(ModelConfig(**SHAPE, attention_pattern="GLL", window=6))
COUNT = 40
WORDS = torch.randint(0, 29, (2, COUNT), generator=torch.Generator().manual_seed(0))
RECENCY = {"keep": 12, "by": "recency", "sinks": 2}
HEAVY = {"keep": 12, "by": "heavy_hitters", "recent": 5, "sinks": 1}
PROMPT = {"keep": 12, "by": "snapkv", "prompt": 24, "recent": 4, "pool": 3}


def decode(model, evict, chunks=(1,) * COUNT):
    cache = model.new_cache(2, COUNT, ServingConfig(evict=evict))
    logits, start = [], 0
    with torch.inference_mode():
        for count in chunks:
            logits.append(model(WORDS[:, start : start + count], cache=cache))
            start += count
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("evict", [RECENCY, HEAVY, PROMPT])
@pytest.mark.parametrize("model", [MODEL, HYBRID])
def test_what_is_kept_does_not_depend_on_the_chunks(model, evict):
    by_token, cache = decode(model, evict)
    for chunks in ([COUNT], [5, 1, 20, 14], [12, 28]):
        logits, other = decode(model, evict, chunks)
        assert (logits - by_token).abs().max() < 1e-10
        for one, two in zip(cache.tensors, other.tensors, strict=True):
            assert torch.allclose(one.double(), two.double(), atol=1e-6)
    with torch.inference_mode():
        assert (model(WORDS)[:, :12] - by_token[:, :12]).abs().max() < 1e-10
        assert (model(WORDS) - by_token)[:, 13:].abs().max() > 1e-3
    assert isinstance(cache.buffers[0], EvictingBuffer)
    assert cache.nbytes == cache.layout.stored_bytes(2, COUNT, "float64")


@pytest.mark.parametrize(
    "evict",
    [{"by": "recency"}, {"by": "heavy_hitters"}, {"by": "snapkv", "prompt": 39, "recent": 4}],
)
def test_a_budget_for_the_whole_context_changes_no_bit(evict):
    plain, plain_cache = decode(MODEL, None)
    kept, cache = decode(MODEL, {"keep": COUNT, **evict})
    assert torch.equal(plain, kept)
    assert cache.nbytes == plain_cache.nbytes


def test_a_prompt_is_cropped_where_its_votes_are_not_lost():
    _, cache = decode(MODEL, PROMPT)
    cache.crop(24)
    with pytest.raises(CacheError, match="has dropped all but 12 of the prompt's 24 tokens; run"):
        cache.crop(23)
    with torch.inference_mode():
        again = MODEL(WORDS[:, 24:], cache=cache)
        assert (again - decode(MODEL, PROMPT)[0][:, 24:]).abs().max() < 1e-10
        cache.reset()
        MODEL(WORDS[:, :23], cache=cache)
        with pytest.raises(CacheError, match="has votes of later queries; run"):
            cache.crop(22)
        cache.crop(20)
        again = MODEL(WORDS[:, 20:], cache=cache)
    assert (again - decode(MODEL, PROMPT)[0][:, 20:]).abs().max() < 1e-10


@pytest.mark.parametrize("length", [18, 22, 30])  # before votes, among them, after the prompt
def test_a_prefix_of_a_prompt_goes_on_as_it_would_have(length):
    how, prefix_cache = ServingConfig(evict=PROMPT), PrefixCache(10**6)
    cache, other = (MODEL.new_cache(1, COUNT, how) for _ in range(2))
    with torch.inference_mode():
        MODEL(WORDS[:1, :length], cache=cache)
        prefix_cache.insert(WORDS[0, :length], cache, weights="w")
        assert prefix_cache.restore(WORDS[0], other, weights="w") == length
        rest = MODEL(WORDS[:1, length:], cache=other)
        assert torch.equal(rest, MODEL(WORDS[:1, length:], cache=cache))


@pytest.mark.parametrize("evict", [RECENCY, HEAVY, PROMPT])
def test_rows_of_other_lengths_and_copies_go_on_as_alone(evict):
    serving = ServingConfig(evict=evict)
    cache = MODEL.new_cache(2, COUNT, serving)
    with torch.inference_mode():
        MODEL(WORDS[:, :30], cache=cache, lengths=[30, 9])
        copies = cache.select_rows(torch.tensor([1, 0, 1]))
        ends = MODEL(WORDS[[1, 0, 1]][:, 30:36], cache=copies)
        for place, (row, length) in enumerate([(1, 9), (0, 30)]):
            text = torch.cat([WORDS[row, :length], WORDS[row, 30:36]])[None]
            alone = MODEL(text, cache=MODEL.new_cache(1, COUNT, serving))
            assert (ends[place] - alone[0, length:]).abs().max() < 1e-10
    assert (ends[0] - ends[2]).abs().max() < 1e-12, "a product may round its rows differently"
    with pytest.raises(CacheError, match="run the prefix again"):
        copies.crop(10)
    copies.reset()
    assert copies.length == 0


@pytest.mark.parametrize("serving", [{}, {"kv_dtype": "int4", "kv_group": 4}])
@pytest.mark.parametrize("by", ["recency", "heavy_hitters"])
def test_a_budget_of_bytes_keeps_what_fits_in_it(serving, by):
    config = ModelConfig(**SHAPE, attention_pattern="GLL", window=6)
    layout = KVLayout.of(config, ServingConfig(**serving, evict={"bytes": 6000, "by": by}))
    more = {"keep": layout.eviction.keep + 1, "by": by}
    larger = KVLayout.of(config, ServingConfig(**serving, evict=more)).stored_bytes(1, 64)
    assert layout.stored_bytes(1, 64) <= 6000 < larger or layout.eviction.keep == 64


def test_a_budget_of_bytes_holds_the_tokens_after_a_prompt():
    config = ModelConfig(**SHAPE, attention_pattern="GLL", window=6)
    evict = {"by": "snapkv", "prompt": 40, "recent": 8, "bytes": 8000}
    layout = KVLayout.of(config, ServingConfig(evict=evict))
    # 128 bytes a token: two rings of 6, 4 bytes a vote of 32 tokens and 2 heads; 24 tokens follow
    assert layout.eviction.keep == (8000 - 2 * 6 * 128 - 2 * 32 * 4) // 128 - 24
    assert layout.stored_bytes(1, 64) == 2 * 6 * 128 + 2 * 32 * 4 + (24 + 24) * 128 <= 8000
    assert layout.read_bytes(1, 64) == 2 * 6 * 128 + (24 + 24) * 128
    assert layout.read_bytes(1, 41) == 2 * 6 * 128 + (24 + 1) * 128
    assert layout.stored_bytes(1, 41) == 2 * 6 * 128 + 2 * 32 * 4 + 40 * 128
    assert layout.bytes_per_token_at_limit() == 128
    assert "(1 global slot x 48 tokens + 2 local slots x 6 tokens) x" in layout.formula(1, 64)
    assert "1 global slot x 2 heads x 32 tokens x 4 bytes of votes" in layout.formula(1, 64)


def test_a_trial_states_what_was_dropped_and_what_the_dtype_costs_beside():
    model = random_model(ModelConfig(**SCORED_SHAPE), dtype=torch.float32)
    text = spread_windows(TEXT, 64, 16)
    evict = {"bytes": 4 * 2 * 2 * (8 + 2) * 6, "by": "recency", "sinks": 1}  # int8: six tokens
    how = ServingConfig(evict=evict, kv_dtype="int8")
    measured = compare_serving(model, text, how, lambda _: None).measurements()
    assert measured["evicted_share"] == pytest.approx(sum(range(11)) / sum(range(17)))
    assert measured["serving_kl"] > 1e-3 > measured["kv_dtype_logit_rms"] ** 2 > 0
    evict = {"by": "snapkv", "prompt": 10, "keep": 6, "recent": 2}
    measured = compare_serving(model, text, ServingConfig(evict=evict), lambda _: None)
    assert measured.evicted_share == pytest.approx(6 * 4 / sum(range(17)))
