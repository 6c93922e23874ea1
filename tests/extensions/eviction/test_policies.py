"""Policies of users' files: which token goes, against a plain reference."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import SpecError
from kvlab.extensions.eviction.slots import find_problems
from kvlab.layout import KVLayout
from kvlab.spec import ModelConfig, ServingConfig, load_experiment
from kvlab.spec.extension_files import describe_error, load_extension, read_extension
from kvlab.spec.members import MemberError
from kvlab.trial.trial import Trial
from tests.contracts.slot_contract import check_copies_of_rows
from tests.extensions.eviction.test_eviction import GLOBAL, HYBRID, SHAPE
from tests.studies.fuzz_model import draw_case, run_case
from tests.support.random_model import random_model

EXAMPLE = Path(__file__).parents[3] / "docs" / "extend" / "last_attention.py"
(POLICY,) = load_extension(read_extension(EXAMPLE)).members
YAML = """\
name: mine
extensions: [mine.py]
model: {vocab_size: 257, block_size: 32, n_layer: 2, n_head: 2, n_embd: 16}
data: {tokenizer: bytes}
benchmark: {prompt_tokens: 8, new_tokens: 8}
serving: {evict: {keep: 8, by: last_attention}}
"""
DECAYED = """\
from kvlab.extend import EvictionPolicy, Extension, SpecModel


class Options(SpecModel):
    rate: float = 0.5


class Decayed(EvictionPolicy):
    name = "decayed"
    options = Options

    def rank(self, scores, step):
        return self.options.rate * scores + step.attention.sum(2)


extension = Extension(eviction_policies=(Decayed(),))
"""


def write(folder, text=None, by="last_attention"):
    (folder / "mine.py").write_text(EXAMPLE.read_text() if text is None else text)
    (folder / "e.yaml").write_text(YAML.replace("last_attention", by))
    return folder / "e.yaml"


@settings(max_examples=12)
@given(
    number=st.integers(0, 10**6),
    keep=st.integers(5, 12),
    recent=st.integers(1, 3),
    sinks=st.integers(0, 1),
    prompt=st.sampled_from(
        [{}, {"prompt": 7}, {"prompt": 20, "pool": 3}, {"prompt": 36, "pool": None}]
    ),
)
def test_logits_agree_with_the_reference(number, keep, recent, sinks, prompt):
    case = draw_case(number)
    if not case.config.kv_form.stores_keys or len({*case.config.kv_owners}) < case.config.n_layer:
        return
    evict = {"keep": keep, "by": POLICY, "recent": recent, "sinks": sinks, **prompt}
    serving = ServingConfig(evict=evict)
    assert run_case(replace(case, serving=serving, dtype=torch.float64)) < 1e-9


RULES = [
    {"by": "recency", "sinks": 1},
    {"by": "heavy_hitters", "recent": 2},
    {"by": POLICY, "recent": 2, "sinks": 1},
    {"by": POLICY, "recent": 8, "prompt": 16, "pool": 3},
    {"by": POLICY, "recent": 6, "prompt": 22},
    {"by": "snapkv", "recent": 2, "prompt": 20},
    {"by": "snapkv", "recent": 2, "prompt": 34},  # buffers have one size: that of the prompt
]


@settings(max_examples=30)
@given(
    number=st.integers(0, 10**6),
    shape=st.sampled_from([(2, "G"), (3, "G"), (5, "GL"), (5, "LGG")]),
    heads=st.sampled_from([1, 2, 4]),
    keep=st.integers(11, 12),
    top_share=st.sampled_from([0.2, 0.5, 1.3, 1.8]),
    rule=st.sampled_from(RULES),
)
def test_layers_keep_numbers_of_tokens_that_change_with_depth(
    number, shape, heads, keep, top_share, rule
):
    settings = {"n_layer": shape[0], "attention_pattern": shape[1], "n_kv_head": heads}
    config = ModelConfig(**{**SHAPE, **settings}, **{"window": 6} if "L" in shape[1] else {})
    serving = ServingConfig(evict={"keep": keep, "top_share": top_share, **rule})
    assert not [*find_problems(config, serving)]
    layout = KVLayout.of(config, serving)
    plans = [plan for plan in layout.plans if plan.layer.window is None]
    kept = [plan.rule.keep for plan in plans]
    assert sum(kept) == keep * len(plans)
    assert kept == sorted(kept, reverse=top_share < 1)
    assert kept[0] != kept[-1]
    case = replace(draw_case(number), config=config, serving=serving, dtype=torch.float64)
    assert run_case(case) < 1e-9
    long = [[size] * len(case.chunks[0]) for size in (20, 15, 3, 1, 2, 4)]
    assert run_case(replace(case, chunks=long, is_ragged=False)) < 1e-9


@pytest.mark.parametrize("prompt", [{}, {"prompt": 24, "pool": 3}])
@pytest.mark.parametrize("config", [GLOBAL, HYBRID])
def test_copies_of_rows_of_other_lengths_go_on_as_each_alone(config, prompt):
    evict = {"keep": 12, "by": POLICY, "recent": 3, **prompt}
    check_copies_of_rows(config, ServingConfig(evict=evict))


def test_a_policy_has_settings_and_its_code_is_in_the_id(tmp_path):
    trials = [
        Trial.of(load_experiment(write(tmp_path, text, by)), "text", 0)
        for text, by in (
            (DECAYED, "decayed"),
            (DECAYED, "{decayed: {rate: 0.5}}"),
            (DECAYED, "{decayed: {rate: 0.25}}"),
            (DECAYED.replace("sum(2)", "amax(2)"), "decayed"),
        )
    ]
    assert len({one.id for one in trials}) == 3
    assert trials[0].id == trials[1].id
    assert len({one.training_id for one in trials}) == 1
    kept = trials[2].experiment.model_dump(mode="json")["serving"]["evict"]["by"]
    assert kept == {"decayed": {"rate": 0.25}}


def test_a_rate_of_one_is_heavy_hitters(tmp_path):
    experiment = load_experiment(write(tmp_path, DECAYED, "{decayed: {rate: 1.0}}"))
    model, words = random_model(GLOBAL), torch.arange(40)[None] % 29
    logits = []
    for by in (experiment.serving.evict.by, "heavy_hitters"):
        cache = model.new_cache(1, 40, ServingConfig(evict={"keep": 12, "by": by}))
        with torch.inference_mode():
            logits.append(model(words, cache=cache))
    assert torch.equal(*logits)


def test_the_sum_of_attention_at_a_prompt_s_end_is_snapkv(tmp_path):
    experiment = load_experiment(write(tmp_path, DECAYED, "{decayed: {rate: 1.0}}"))
    model, words = random_model(GLOBAL), torch.arange(40)[None] % 29
    logits = []
    for by in (experiment.serving.evict.by, "snapkv"):
        evict = {"keep": 12, "by": by, "prompt": 24, "recent": 4, "pool": 3}
        cache = model.new_cache(1, 40, ServingConfig(evict=evict))
        with torch.inference_mode():
            logits.append(torch.cat([model(part, cache=cache) for part in words.split(5, 1)], 1))
    assert torch.equal(*logits)


def test_its_bytes_are_those_of_scores_and_positions():
    config = ModelConfig(vocab_size=29, n_layer=1, n_head=4, n_embd=32, block_size=64)
    layout = KVLayout.of(config, ServingConfig(evict={"keep": 12, "by": POLICY}))
    assert layout.stored_bytes(1, 64) == 12 * (2 * 32 * 4 + 4 * 8)
    of_prompt = {"keep": 12, "by": POLICY, "prompt": 40, "recent": 8}
    layout = KVLayout.of(config, ServingConfig(evict=of_prompt))
    assert layout.stored_bytes(1, 64) == 40 * 2 * 32 * 4 + 4 * (40 - 8) * 4


def test_mistakes_have_their_place(tmp_path):
    with pytest.raises(SpecError, match=r"e.yaml:6:32: serving.evict.by = lst is not one of"):
        load_experiment(write(tmp_path, by="lst"))
    taken = EXAMPLE.read_text().replace('"last_attention"', '"snapkv"')
    with pytest.raises(SpecError, match=r"mine.py:9:1: LastAttention has name = 'snapkv'"):
        load_experiment(write(tmp_path, taken))
    for change, found in (("", "(1, 2, 2, 20)"), (".mean(2).numpy()", "ndarray")):
        wrong = EXAMPLE.read_text().replace(".mean(2)", change)
        serving = load_experiment(write(tmp_path, wrong)).serving
        model = random_model(GLOBAL)
        with pytest.raises(MemberError) as error, torch.inference_mode():
            model(torch.zeros(1, 20, dtype=torch.int64), cache=model.new_cache(1, 32, serving))
        said = describe_error(error.value)
        assert said.startswith(f"mine.py:9: LastAttention returns {found} from rank")


ENDLESS = [float("inf"), float("nan"), float("-inf")]


def add_score(score):
    return DECAYED.replace("return", f"return scores + float('{score}')\n        return")


@pytest.mark.parametrize("score", ENDLESS)
def test_sinks_and_the_newest_stay_whatever_scores_are(tmp_path, score):
    text = add_score(score)
    serving = load_experiment(write(tmp_path, text, "decayed, sinks: 2, recent: 3")).serving
    model = random_model(GLOBAL)
    cache = model.new_cache(1, 32, serving)
    with torch.inference_mode():
        model(torch.zeros(1, 20, dtype=torch.int64), cache=cache)
    kept = cache.buffers[0].token_positions
    assert {0, 1, 17, 18, 19} <= {*kept[0, 0].tolist()}


@pytest.mark.parametrize("score", ENDLESS)
def test_sinks_and_last_tokens_of_a_prompt_stay_whatever_scores_are(tmp_path, score):
    rule = "decayed, sinks: 2, recent: 3, prompt: 16"
    serving = load_experiment(write(tmp_path, add_score(score), rule)).serving
    model = random_model(GLOBAL)
    cache = model.new_cache(1, 32, serving)
    with torch.inference_mode():
        model(torch.arange(16)[None], cache=cache)
        keys = cache.buffers[0].read(slice(0, 8))[0].clone()
        plain = model.new_cache(1, 32)
        model(torch.arange(16)[None], cache=plain)
    all_keys = plain.buffers[0].read(slice(0, 16))[0]
    for token in (0, 1, 13, 14, 15):
        assert (keys == all_keys[:, :, token : token + 1]).all(-1).any(-1).all()
