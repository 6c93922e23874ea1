"""Reuse between turns: loads, what they could reuse at most, and what a prefix cache does reuse."""

from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlab.benchmark.benchmark_stage import benchmark
from kvlab.benchmark.measurement import StopRule
from kvlab.benchmark.session import BenchmarkSettings, Session, Variant
from kvlab.cli.main import main
from kvlab.errors import DataError, MeasurementError
from kvlab.extensions.conversations import measure as measures
from kvlab.extensions.conversations.config import ConversationsConfig, Draw
from kvlab.extensions.conversations.load import draw, draw_whole, find_exact_hits, make_load
from kvlab.extensions.conversations.measure import (
    Books,
    conversation_bytes,
    keep_books,
    measure,
    serve_both_ways,
    serve_turn,
)
from kvlab.extensions.conversations.prefix_cache import PrefixCache
from kvlab.own_extensions import find_members
from kvlab.spec import Experiment, ModelConfig, ServingConfig
from kvlab.store.metrics import METRICS, collect_metrics
from kvlab.track.run_description import tracked_metrics
from kvlab.trial import Trial
from tests.benchmark.sessions import DEFAULTS
from tests.contracts.measure_contract import check_measure
from tests.extensions.conversations.records import RECORD
from tests.report.reading import load as load_study
from tests.report.reading import markdown
from tests.support.extensions import needs
from tests.support.golden import check_golden
from tests.support.random_model import random_model

TEXT = np.random.default_rng(0).integers(0, 17, 4000).tolist()
SHAPE = {"vocab_size": 17, "block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 8,
         "position": "rope"}  # fmt: skip
LAYOUTS = {
    "plain": ({}, {}),
    "window": ({"window": 8, "attention_pattern": "GL"}, {}),
    "int8": ({}, {"kv_dtype": "int8"}),
    "overwrite": ({}, {"tie": "adjacent:2"}),
    "owner": ({}, {"tie": "adjacent:2", "tie_rule": "owner"}),
    **{key: ({}, {key: value}) for key, value in find_members("checked_servings").items()},
}  # fmt: skip
CONFIG = ConversationsConfig(
    count=12, turns={"distribution": "uniform", "min": 2, "max": 4}, system_tokens=6,
    prompt_tokens={"distribution": "geometric", "mean": 6, "max": 12}, reply_tokens=4,
    snapshot_tokens=8, measured=3,
)  # fmt: skip


def variant(name):
    model, serving = LAYOUTS[name]
    config = ModelConfig(**SHAPE, **model)
    return Variant(name, random_model(config).eval(), ServingConfig(**serving), "bytes")


def make_session(names, config=CONFIG, text=TEXT):
    settings = DEFAULTS | {"stop_rule": StopRule(min_rounds=2, max_rounds=2)}
    settings |= {"options": {"conversations": config}, "held_out": text}
    return Session([variant(name) for name in names], BenchmarkSettings(**settings))


@pytest.fixture(scope="module")
def load():
    return make_load(CONFIG, TEXT, 64)


def test_a_load_is_seeded_text_in_order_of_time(load):
    assert load == make_load(CONFIG, TEXT, 64)
    other = CONFIG.model_copy(update={"seed": 1})
    assert load.requests != make_load(other, TEXT, 64).requests
    with pytest.raises(DataError, match="there are 40"):
        make_load(CONFIG, TEXT[:40], 64)
    times = [request.seconds for request in load.requests]
    assert times == sorted(times)
    assert len({request.conversation for request in load.requests}) == 12
    contexts: dict[int, list[int]] = {}
    for request in load.requests:
        before = contexts.get(request.conversation, load.requests[0].prompt[:6])
        assert request.prompt[: len(before)] == before, "a prompt is the conversation so far"
        assert len(request.context) <= 64
        contexts[request.conversation] = request.context
    joined = " ".join(map(str, TEXT))
    assert all(" ".join(map(str, one[6:])) in joined for one in contexts.values())


def test_draws_have_the_stated_means_and_bounds():
    rng = np.random.default_rng(0)
    for spread, mean in (
        (Draw(distribution="lognormal", mean=24, sigma=0.5), 24),
        (Draw(distribution="geometric", mean=4), 4),
        (Draw(distribution="exponential", mean=30), 30),
        (Draw(distribution="uniform", min=2, max=6), 4),
        (Draw(distribution="constant", mean=7), 7),
    ):
        assert draw(spread, 20_000, rng).mean() == pytest.approx(mean, rel=0.03)
    clipped = draw_whole(Draw(distribution="geometric", mean=4, min=2, max=6), 1000, rng)
    assert set(clipped) == {2, 3, 4, 5, 6}
    assert set(draw_whole(Draw(distribution="uniform", min=0, max=2), 100, rng)) == {1, 2}


def test_the_upper_bound_is_the_longest_common_prefix_by_brute_force(load):
    hits, past = [], []
    for request in load.requests:
        common = (
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(request.prompt, other)))  # noqa: B905
            for other in past
        )
        hits.append(min(max(common, default=0), len(request.prompt) - 1))
        past.append(request.context)
    assert find_exact_hits(load) == hits


# What a prefix cache reuses


@pytest.mark.parametrize("name", LAYOUTS)
def test_bookkeeping_is_that_of_the_cache_that_serves_also_while_it_evicts(name, load):
    served = variant(name)
    budget = int(2 * conversation_bytes(served, load, 8))
    prefixes = PrefixCache(budget, snapshot_every=8)
    cache = served.model.new_cache(1, 64, served.serving)
    hits, held = [], []
    for request in load.requests:
        hits.append(
            serve_turn(prefixes, cache, request, lambda part: _run(served.model, part, cache))
        )
        held.append(sum(tensor.nbytes for tensor in prefixes.tensors))
    books = keep_books(served, load, budget, 8)
    assert (books.hits, books.bytes_held) == (hits, held)
    assert books.evictions == prefixes.evictions > 0
    assert max(books.bytes_held) <= budget
    most = sum(find_exact_hits(load)) / load.prompt_tokens
    assert most - 0.02 <= keep_books(served, load, None, 8).hit_rate <= most, "the upper bound"
    assert books.hit_rate < most - 0.1, "the budget matters"


def _run(model, tokens, cache):
    with torch.inference_mode():
        model(torch.tensor([tokens]), cache)


def test_five_rounds_reach_the_published_curve():
    """SGLang's multi-turn bench: 4 clients, 5 rounds of about 2,048 tokens, replies of one token,
    the clients round by round (github.com/sgl-project/sglang/pull/10203)."""
    config = ConversationsConfig(count=4, turns=5, prompt_tokens=64, reply_tokens=1,
                                 start_seconds=0, think_seconds=1)  # fmt: skip
    rounds = make_load(config, range(4000), 325)
    assert [request.turn for request in rounds.requests] == [n for n in range(1, 6) for _ in "abcd"]
    long = Variant(
        "long", random_model(ModelConfig(**SHAPE | {"block_size": 325})), ServingConfig()
    )
    books = keep_books(long, rounds, None, 64)
    rates = [hit / len(one.prompt) for hit, one in zip(books.hits, rounds.requests, strict=True)]
    assert rates[::4] == pytest.approx([0, 0.51, 0.66, 0.74, 0.79], abs=0.02)


def test_only_where_passes_matter_does_reuse_change_a_reply(load):
    changes = {}
    for name in LAYOUTS:
        session = make_session([name])
        turns = list(serve_both_ways(session, session.variants[0], CONFIG, load.select_first(2)))
        assert any(turn.hit for turn in turns)
        changes[name] = max(abs(value) for turn in turns for value in turn.changes)
    assert changes.pop("overwrite") > 0.01
    assert max(changes.values()) < 1e-9


def test_a_cache_that_does_not_keep_its_books_is_a_bug(load, monkeypatch):
    monkeypatch.setattr(measures, "keep_books", lambda *_: Books([0] * 9, 0.0, [2] * 9, 0))
    session = make_session(["plain"])
    with pytest.raises(MeasurementError, match="by its bookkeeping 0 and 2"):
        list(serve_both_ways(session, session.variants[0], CONFIG, load.select_first(1)))


def test_the_lines_agree_with_each_other():
    config = CONFIG.model_copy(update={"budget": 3000, "budgets": (1000, 10**6)})
    lines = list(measure(make_session(["overwrite"], config)))
    of = {}
    for line in lines:
        of.setdefault(line.metric, []).append(line)
    curve = {line.budget_bytes: line.value for line in of["budget_hit_rate"]}
    assert list(curve) == [1000, 3000, 10**6]
    assert curve[3000] == of["hit_rate"][0].value
    assert list(curve.values()) == sorted(curve.values())
    (each,), (fit,) = of["conversation_bytes"], of["conversations"]
    assert fit.value == 3000 // each.value
    turns = {line.turn: line.value for line in of["turn_hit_rate_exact"]}
    assert list(turns) == [1, 2, 3, 4]
    assert turns[1] < min(list(turns.values())[1:])
    assert of["flops_saved"][0].value == pytest.approx(of["hit_rate"][0].value, abs=0.05)
    assert of["reuse_gap"][0].value != 0
    assert of["warm_ttft"][0].value > 0 < of["cold_ttft"][0].value
    assert {of[name][0].attention for name in ("warm_ttft", "cold_ttft")} == {"flash_attention"}
    random = list(measure(make_session(["overwrite"], config, text=())))
    assert "reuse_gap" not in {line.metric for line in random}, "losses of random tokens"


def test_a_trial_has_them_as_metrics():
    settings = {"prompt_tokens": 8, "new_tokens": 4, "repeats": 1, "seconds": 0.01}
    experiment = Experiment(
        name="small",
        model=SHAPE | {"vocab_size": 257},
        data={"tokenizer": "bytes"},
        benchmark={**settings, "conversations": {"count": 2, "turns": 2, "budget": 10**6}},
    )
    model = random_model(experiment.model, dtype=torch.float32)
    measured = benchmark(model, experiment, held_out=TEXT).measurements
    assert measured.keys() <= METRICS.keys()
    found = {name for name in measured if name.startswith("reuse_")}
    missing = {f"reuse_hit_rate_turn{turn}" for turn in range(3, 17)} | {"reuse_ttft_ratio"}
    assert found == {name for name in METRICS if name.startswith("reuse_")} - missing
    assert measured["reuse_hit_rate"] == pytest.approx(24 / 56)
    assert measured["reuse_hit_rate_turn2"] == pytest.approx(24 / 40)
    assert collect_metrics({"measurements": measured})["reuse_ttft_ratio"] > 0


def test_the_measure_keeps_the_contract():
    load = ConversationsConfig(count=3, turns=2, prompt_tokens=8, budget=10_000)
    held_out = [n % 257 for n in range(1000)]
    check_measure("conversations", options={"conversations": load}, held_out=held_out)
    check_measure("conversations", is_available=False)


def experiment(**conversations):
    given = {"conversations": conversations} if conversations else {}
    model = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 128, "vocab_size": 257}
    return Experiment(name="a", model=model, data={"tokenizer": "bytes"},
                      benchmark={"prompt_tokens": 8, "new_tokens": 8, **given})  # fmt: skip


def trial_id(**conversations):
    return Trial.of(experiment(**conversations), "digest", 0).id


def test_a_load_changes_the_trial_and_its_spelling_does_not():
    assert "conversations" not in experiment().benchmark.identity()
    assert trial_id() != trial_id(turns=4)
    assert trial_id(turns=4) == trial_id(turns={"distribution": "constant", "mean": 4}, count=32)
    assert trial_id(turns=4) != trial_id(turns=4, budget=1000)


def test_the_section_is_the_golden_one(tmp_path):
    text = markdown(load_study(RECORD, tmp_path, "reuse"))
    check_golden(Path(__file__).with_name("report.txt"), text)


def test_turns_are_a_curve_of_a_group_of_their_own():
    result = RECORD.result({"heads": "mqa", "sharing": "none"}, 0, "done")
    result["measurements"] = {f"reuse_hit_rate_turn{turn}": turn / 16 for turn in (1, 2, 10)}
    result["measurements"]["reuse_hit_rate"] = 0.5
    points = [point for point in tracked_metrics(result) if point[0].startswith("reuse/")]
    curve = [("reuse/hit_rate_by_turn", turn / 16, turn) for turn in (1, 2, 10)]
    assert points == [("reuse/hit_rate", 0.5, None), *curve]


def test_a_gap_of_rounding_is_zero():
    assert collect_metrics({"measurements": {"reuse_gap": -9e-6}})["reuse_gap"] == 0.0


@needs("bench")
def test_bench_refuses_a_load_of_a_file_that_another_model_cannot_hold(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shape = "vocab_size: 257, n_layer: 1, n_head: 1, n_embd: 8"
    benchmark = "benchmark: {prompt_tokens: 4, new_tokens: 4"
    for name, size, end in (("a", 128, ", conversations: {turns: 1, count: 2}}"), ("b", 20, "}")):
        text = f"name: {name}\nmodel: {{{shape}, block_size: {size}}}\ndata: {{tokenizer: bytes}}\n"
        (tmp_path / f"{name}.yaml").write_text(f"{text}{benchmark}{end}\n")
    words = ["bench", "a.yaml", "b.yaml", "--only", "conversations", "--new-tokens", "4"]
    assert main(words) == 2
    assert "a.yaml: benchmark.conversations: turns and the tokens" in capsys.readouterr().err
