"""Slots that drop tokens: rows that go on apart, prefixes, bytes to the byte, and what is said."""

import pytest
import torch

from kvlab.benchmark.measures.decode_memory import count_kv_bytes
from kvlab.data.batches import spread_windows
from kvlab.errors import SpecError
from kvlab.evaluate.validation_loss import compare_serving
from kvlab.layout import KVLayout
from kvlab.layout.roofline_model import decode_step_cost
from kvlab.model import GPT
from kvlab.model.generate import EagerDecoder, StaticDecoder, prefill
from kvlab.report.sections import SECTIONS
from kvlab.spec import ModelConfig, ServingConfig, load_served_model
from tests.contracts.slot_contract import check_copies_of_rows
from tests.evaluate.test_serving_comparison import SHAPE as SCORED_SHAPE
from tests.evaluate.test_serving_comparison import TEXT
from tests.report.full_record import FullRecord
from tests.report.reading import load, rows
from tests.support.prefixes import copy_prefix
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 29, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32,
         "block_size": 64, "position": "rope"}  # fmt: skip
GLOBAL = ModelConfig(**SHAPE)
HYBRID = ModelConfig(**SHAPE, attention_pattern="GLL", window=6)
MODEL = random_model(GLOBAL)
COUNT = 40
WORDS = torch.randint(0, 29, (2, COUNT), generator=torch.Generator().manual_seed(0))
PROMPT = {"keep": 12, "by": "snapkv", "prompt": 24, "recent": 4, "pool": 3}
SERVINGS = [
    ServingConfig(evict={"keep": 12, "by": "recency", "sinks": 2}),
    ServingConfig(evict={"keep": 12, "by": "heavy_hitters", "recent": 5, "sinks": 1}),
    ServingConfig(evict=PROMPT),
]


@pytest.mark.parametrize("serving", SERVINGS)
@pytest.mark.parametrize("config", [GLOBAL, HYBRID])
def test_copies_of_rows_of_other_lengths_go_on_as_each_alone(config, serving):
    check_copies_of_rows(config, serving)


@pytest.mark.parametrize("serving", SERVINGS[1:])
def test_padding_that_is_no_number_stays_out_of_what_is_kept(serving):
    model = random_model(GLOBAL)
    with torch.inference_mode():
        model.token_embedding.weight[28] = torch.nan  # of padding alone
        cache = model.new_cache(2, COUNT, serving)
        model(torch.tensor([[28, 28], [1, 2]]), cache=cache, lengths=[0, 2])
        for tokens, lengths in (([[3, 28], [4, 5]], [1, 2]), ([[6], [28]], [1, 0])):
            logits = model(torch.tensor(tokens), cache=cache, lengths=lengths)
        alone = model(torch.tensor([[3, 6]]), cache=model.new_cache(1, COUNT, serving))
    assert (logits[0, -1, :28] - alone[0, -1, :28]).abs().max() < 1e-10


@pytest.mark.parametrize(
    "evict",
    [{"by": "recency"}, {"by": "heavy_hitters"}, {"by": "snapkv", "prompt": 39, "recent": 4}],
)
def test_a_budget_for_the_whole_context_changes_no_bit(evict):
    logits, bytes_held = [], set()
    for serving in (None, ServingConfig(evict={"keep": COUNT, **evict})):
        cache = MODEL.new_cache(2, COUNT, serving)
        with torch.inference_mode():
            logits.append(torch.cat([MODEL(part, cache=cache) for part in WORDS.split(1, 1)], 1))
        bytes_held.add(cache.nbytes)
    assert torch.equal(*logits)
    assert len(bytes_held) == 1


@pytest.mark.parametrize("length", [18, 22, 30])  # before the scores, among them, after the prompt
def test_a_prefix_of_a_prompt_goes_on_as_it_would_have(length):
    cache, other = (MODEL.new_cache(1, COUNT, ServingConfig(evict=PROMPT)) for _ in range(2))
    with torch.inference_mode():
        MODEL(WORDS[:1, :length], cache=cache)
        copy_prefix(cache, other)
        rest = MODEL(WORDS[:1, length:], cache=other)
        assert torch.equal(rest, MODEL(WORDS[:1, length:], cache=cache))


@pytest.mark.parametrize("serving", [{}, {"kv_dtype": "int4", "kv_group": 4}])
@pytest.mark.parametrize("by", ["recency", "heavy_hitters"])
def test_a_budget_of_bytes_keeps_what_fits_in_it(serving, by):
    config = ModelConfig(**SHAPE, attention_pattern="GLL", window=6)
    layout = KVLayout.of(config, ServingConfig(**serving, evict={"bytes": 6000, "by": by}))
    more = {"keep": layout.plans[0].rule.keep + 1, "by": by}
    larger = KVLayout.of(config, ServingConfig(**serving, evict=more)).stored_bytes(1, 64)
    assert layout.stored_bytes(1, 64) <= 6000 < larger or layout.plans[0].rule.keep == 64


def test_a_budget_of_bytes_holds_the_tokens_after_a_prompt():
    config = ModelConfig(**SHAPE, attention_pattern="GLL", window=6)
    evict = {"by": "snapkv", "prompt": 40, "recent": 8, "bytes": 8000}
    layout = KVLayout.of(config, ServingConfig(evict=evict))
    # 128 bytes a token: two rings of 6, 4 bytes a score of 32 tokens and 2 heads; 24 tokens follow
    assert layout.plans[0].rule.keep == (8000 - 2 * 6 * 128 - 2 * 32 * 4) // 128 - 24
    assert layout.stored_bytes(1, 64) == 2 * 6 * 128 + 2 * 32 * 4 + (24 + 24) * 128 <= 8000
    assert layout.read_bytes(1, 64) == 2 * 6 * 128 + (24 + 24) * 128
    assert layout.read_bytes(1, 41) == 2 * 6 * 128 + (24 + 1) * 128
    assert layout.stored_bytes(1, 41) == 2 * 6 * 128 + 2 * 32 * 4 + 40 * 128
    assert layout.bytes_per_token_at_limit() == 128
    assert "(1 global slot x 48 tokens + 2 local slots x 6 tokens) x" in layout.formula(1, 64)
    assert "(1 global slot x 2 heads) x 32 tokens x 4 bytes of scores" in layout.formula(1, 64)


def test_deeper_layers_keep_fewer_tokens_of_the_same_bytes():
    config = ModelConfig(**{**SHAPE, "n_layer": 4})
    for rule in ({"by": "heavy_hitters", "recent": 4, "sinks": 2}, {"by": "recency", "sinks": 6}):
        even, falls = (
            KVLayout.of(config, ServingConfig(evict={"keep": 18, **rule, **more}))
            for more in ({}, {"top_share": 0.25})
        )
        # 12 places beside those that always stay: 12 times 1.75, 1.25, 0.75 and 0.25
        assert [plan.rule.keep for plan in falls.plans] == [6 + n for n in (21, 15, 9, 3)]
        assert falls.stored_bytes(1, 64) == even.stored_bytes(1, 64)
        assert falls.identity() != even.identity()
        assert "1 global slot x 27 tokens kept" in falls.formula(1, 64)
        assert "4 global slots x 18 tokens kept" in even.formula(1, 64)
    same = ServingConfig(evict={"keep": 18, "sinks": 6, "top_share": 1.0})
    assert KVLayout.of(config, same) == even
    one_layer = {"model.n_layer": 1, "serving.evict": {"keep": 18, "top_share": 1.0}}
    load_served_model("gpt2", one_layer)
    text = spread_windows(TEXT, 64, 16)
    evict = {"keep": 8, "sinks": 2, "top_share": 0.5}  # 11 and 5 of 16 tokens
    model = random_model(ModelConfig(**{**SCORED_SHAPE, "n_layer": 2}))
    measured = compare_serving(model, text, ServingConfig(evict=evict)).measurements()
    dropped = (sum(range(6)) + sum(range(12))) / 2
    assert measured["evicted_share"] == pytest.approx(dropped / sum(range(17)))


def test_a_trial_states_what_was_dropped_and_what_the_dtype_costs_beside():
    model = random_model(ModelConfig(**SCORED_SHAPE), dtype=torch.float32)
    text = spread_windows(TEXT, 64, 16)
    evict = {"bytes": 4 * 2 * 2 * (8 + 2) * 6, "by": "recency", "sinks": 1}  # int8: six tokens
    how = ServingConfig(evict=evict, kv_dtype="int8")
    measured = compare_serving(model, text, how).measurements()
    assert measured["evicted_share"] == pytest.approx(sum(range(11)) / sum(range(17)))
    assert measured["serving_kl"] > 1e-3 > measured["kv_dtype_logit_rms"] ** 2 > 0
    evict = {"by": "snapkv", "prompt": 10, "keep": 6, "recent": 2}
    measured = compare_serving(model, text, ServingConfig(evict=evict)).measurements()
    assert measured["evicted_share"] == pytest.approx(6 * 4 / sum(range(17)))


def test_a_budget_of_bytes_is_of_both_dtypes():
    """A token takes 2 x (16 + 2) bytes of K and 2 x (8 + 2) of V in one global layer."""
    config = ModelConfig(**{**SHAPE, "n_layer": 1, "n_embd": 64})
    kept = {"evict": {"bytes": 9 * 56, "sinks": 1}}
    how = ServingConfig(kv_dtype={"k": "int8", "v": "int4"}, **kept)
    assert KVLayout.of(config, how).plans[0].rule.keep == 9
    assert KVLayout.of(config, how).stored_bytes(1, 64) == 9 * 56
    assert how.store_as_model(config) == ServingConfig(evict={"keep": 9, "sinks": 1})


@pytest.mark.parametrize(
    ("shape", "serving", "stored", "read"),
    [
        (
            {"attention_pattern": "GLLLLL", "window": 10},
            {"evict": {"keep": 12, "by": "heavy_hitters"}},  # 4 heads have 8 bytes of scores
            12 * (2 * 32 * 4 + 4 * 8) + 5 * 10 * 2 * 32 * 4,
            12 * (2 * 32 * 4 + 4 * 8) + 5 * 10 * 2 * 32 * 4,
        ),
        (
            {"attention_pattern": "GLLLLL", "window": 10},
            {"evict": {"keep": 12, "by": "snapkv", "prompt": 20, "recent": 4}},
            (12 + 12) * 256 + 4 * 16 * 4 + 5 * 10 * 256,  # 4 heads have 16 scores
            (12 + 12) * 256 + 5 * 10 * 256,
        ),
        ({}, {"evict": {"bytes": 10_000, "by": "recency"}}, 6 * 6 * 256, 6 * 6 * 256),
    ],
)
def test_kv_bytes_are_those_counted_by_hand(shape, serving, stored, read):
    base = {"vocab_size": 64, "block_size": 32, "n_layer": 6, "n_head": 4, "n_embd": 32}
    model = GPT(ModelConfig(**{**base, **shape}))
    counted = count_kv_bytes(model, ServingConfig(**serving), 1, 32)
    assert counted == {"kv_formula": stored, "kv_storage": stored, "kv_read": read}


def test_a_step_does_not_multiply_what_is_dropped():
    model = ModelConfig(preset="gpt2")
    plain = decode_step_cost(model, ServingConfig(), 1, 1024, "float32")
    kept = decode_step_cost(model, ServingConfig(evict={"keep": 64}), 1, 1024, "float32")
    assert plain.flops - kept.flops == 12 * 4 * 768 * (1024 - 64)


def test_the_static_step_of_a_ring_computes_the_same():
    logits = []
    for decoder in (EagerDecoder, StaticDecoder):
        cache = MODEL.new_cache(2, COUNT, SERVINGS[0])
        with torch.inference_mode():
            steps = [prefill(MODEL, WORDS[:, :20], cache, [20, 13])]
            decode = decoder(MODEL, cache)
            steps += [decode(token).clone() for token in WORDS[:, 20:].T]
        logits.append(torch.stack(steps))
    assert (logits[1] - logits[0]).abs().max() < 1e-10


def test_a_model_of_states_alone_has_nothing_to_drop():
    changes = {"model.attention_pattern": "L", "model.window": 8, "serving.evict": {"keep": 8}}
    with pytest.raises(SpecError, match="no layer to act on: all have a window"):
        load_served_model("gpt2", changes)


class EvictingRecord(FullRecord):
    """A full record whose cells kept some tokens."""

    def measurements(self, levels, seed):
        return super().measurements(levels, seed) | {"evicted_share": 0.25}

    def result(self, levels, seed, status):
        result = super().result(levels, seed, status)
        serving = ServingConfig(evict={"keep": 10**9, "by": "recency", "sinks": 2})
        result["experiment"]["serving"] = serving.model_dump(mode="json")
        return result


def test_a_table_says_what_cells_keep_and_drop(tmp_path):
    section = SECTIONS["serving-gap"].make(load(EvictingRecord(), tmp_path))
    assert "prompt" not in str(section), "no cell has one"
    found = rows(section, "eviction")
    assert len(found) == 6
    for row in found:
        assert row["keeps"] == "1,000,000,000 tokens by recency, sinks 2"
        assert float(row["dropped (%)"]) == 25.0
