"""The table of metrics, and metrics that are derived from others."""

from dataclasses import replace
from functools import partial

import pytest

from kvlab.errors import MeasurementError
from kvlab.store import Store
from kvlab.store.metrics import METRICS, Metric, collect_metrics
from kvlab.track.run_description import describe_run
from kvlab.trial.run import run_trial
from tests.contracts.metric_contract import MetricContract
from tests.support.stub_trials import StubStages, tiny_plan


class TestMetrics(MetricContract):
    @pytest.fixture(params=METRICS)
    def name(self, request):
        return request.param


class StagesWithToyMetric(StubStages):
    def measure(self, directory):
        measured = super().measure(directory)
        return replace(measured, measurements={**measured.measurements, "toy": 2.5})


def run_toy_trial(tmp_path):
    trial, store = tiny_plan(tmp_path).trials[0].trial, Store(tmp_path / "runs")
    run_trial(trial, store.path, make_stages=partial(StagesWithToyMetric, flag=""))
    return trial, store


def test_a_metric_is_added_by_one_entry_of_the_table(tmp_path, monkeypatch):
    monkeypatch.setitem(METRICS, "toy", Metric("toy metric", "toys", "higher"))
    half = Metric("half a toy", "toys", derive=lambda m: m["toy"] / 2 if "toy" in m else None)
    monkeypatch.setitem(METRICS, "half_toy", half)
    trial, store = run_toy_trial(tmp_path)
    result = store.result(trial.id)
    assert result["measurements"]["toy"] == 2.5
    assert "half_toy" not in result["measurements"], "derived, so not recorded"
    assert collect_metrics(result)["half_toy"] == 1.25
    sweep = {"name": "s", "factors": {"heads": ["mha"]}, "baseline": {"heads": "mha"}}
    run = describe_run(sweep, {"heads": "mha"}, result, store.trial_directory(trial.id))
    assert {name: value for name, value, _, _ in run.points if "toy" in name} == {
        "quality/toy": 2.5, "quality/half_toy": 1.25,
    }  # fmt: skip


def test_a_number_that_is_not_in_the_table_is_refused(tmp_path):
    trial, store = run_toy_trial(tmp_path)
    error = store.result(trial.id)["error"]
    assert (error["class"], error["type"]) == ("bug", MeasurementError.__name__)
    assert "toy" in error["message"]


def test_the_speed_that_the_cache_buys():
    metrics = collect_metrics({"measurements": {"tpot_ms_uncached_p50": 6.0, "tpot_ms_p50": 1.5}})
    assert metrics["cache_speedup"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    "recorded", [None, {}, {"tpot_ms_p50": 1.5}, {"tpot_ms_uncached_p50": 0.0}]
)
def test_a_derived_metric_that_does_not_apply_is_left_out(recorded):
    assert "cache_speedup" not in collect_metrics({"measurements": recorded})


def test_a_recorded_value_precedes_a_derived_one_and_the_result_stays_as_it_is():
    result = {
        "measurements": {"tpot_ms_uncached_p50": 6.0, "tpot_ms_p50": 1.5, "cache_speedup": 9.0}
    }
    assert collect_metrics(result)["cache_speedup"] == 9.0
    plain = {"measurements": {"tpot_ms_uncached_p50": 6.0, "tpot_ms_p50": 1.5}}
    collect_metrics(plain)
    assert "cache_speedup" not in plain["measurements"]


def test_infinite_derived_values_are_left_out(monkeypatch):
    monkeypatch.setitem(METRICS, "odd", Metric("odd", "", "lower", lambda _: float("inf")))
    assert "odd" not in collect_metrics({"measurements": {}})


@pytest.mark.parametrize(
    ("name", "title", "unit", "better"),
    [
        ("lm_eval_arc_easy_acc", "lm-eval arc_easy acc", "", "higher"),
        ("lm_eval_arc_easy_acc_norm_served", "lm-eval arc_easy acc_norm, served", "", "higher"),
        ("lm_eval_wikitext_word_perplexity", "lm-eval wikitext word_perplexity", "perplexity",
         "lower"),
        ("lm_eval_truthfulqa_rouge_max_served", "lm-eval truthfulqa_rouge_max, served", "score",
         "neither"),
        ("lm_eval_piqa_items", "lm-eval piqa items", "items", "neither"),
    ],
)  # fmt: skip
def test_tasks_of_lm_eval_are_metrics_by_their_names(name, title, unit, better):
    assert name in METRICS
    assert (METRICS[name].title, METRICS[name].unit, METRICS[name].better) == (title, unit, better)


def test_other_names_are_no_metrics_by_that_rule():
    for name in ("lm_eval_", "lm_eval", "acc", "lm_eval_Piqa_acc"):
        assert name not in METRICS
        with pytest.raises(KeyError):
            METRICS[name]


def test_metrics_are_sorted_as_the_table_and_then_by_task():
    names = ["lm_eval_b_acc_served", "lm_eval_a_acc", "unknown", "lm_eval_b_acc", "loss_served",
             "lm_eval_b_acc_norm", "loss"]  # fmt: skip
    assert METRICS.sort(names) == (
        "loss", "loss_served", "lm_eval_a_acc", "lm_eval_b_acc", "lm_eval_b_acc_served",
        "lm_eval_b_acc_norm",
    )  # fmt: skip
