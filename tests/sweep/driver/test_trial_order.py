"""The order in which trials start."""

import random

from kvlab.sweep.driver.trial_queue import order_trials
from tests.support.stub_trials import tiny_plan

SWEEP = """\
question: What does it cost?
experiment: e.yaml
factors:
  rate:
    low: {}
    mid: {training.learning_rate: 1e-3}
    high: {training.learning_rate: 2e-3}
  heads:
    mha: {}
    mqa: {model.n_kv_head: 1}
  serving:
    plain: {}
    tied: {serving.tie: "adjacent:2"}
    int8: {serving.kv_dtype: int8}
seeds: [0, 1, 2, 3]
"""


def test_the_baseline_then_every_architecture_then_a_shuffle(tmp_path):
    planned = tiny_plan(tmp_path, text=SWEEP).trials
    ordered = order_trials(planned)
    assert sorted(p.trial.id for p in ordered) == sorted(p.trial.id for p in planned)
    assert ordered[0] == planned[0]
    early = [(p.levels["heads"], p.levels["serving"]) for p in ordered[:6]]
    assert len(set(early)) == 6
    rates = [p.levels["rate"] for p in ordered[6:]]
    assert rates != sorted(rates, key=["low", "mid", "high"].index)
    # early results are representative: no level is left to the end
    assert {p.levels["rate"] for p in ordered[6:26]} == {"low", "mid", "high"}


def test_whoever_trains_comes_before_those_who_share(tmp_path):
    planned = tiny_plan(tmp_path, text=SWEEP).trials
    seen = set()
    for one in order_trials(planned):
        assert one.shares_with is None or one.shares_with in seen
        seen.add(one.trial.id)


def test_the_order_is_the_same_every_time_and_of_any_part(tmp_path):
    planned = list(tiny_plan(tmp_path, text=SWEEP).trials)
    assert order_trials(planned) == order_trials(planned)
    part = [one for one in planned if random.Random(one.trial.id).random() < 0.5]
    assert sorted(p.trial.id for p in order_trials(part)) == sorted(p.trial.id for p in part)
