"""The table of metrics, and metrics that are derived from others."""

from dataclasses import replace
from functools import partial

import pytest

from kvlab.spec import ModelConfig
from kvlab.store import Store
from kvlab.store.metrics import METRICS, Metric, collect_metrics
from kvlab.track.run_description import describe_run
from kvlab.trial.run import run_task
from tests.contracts.metric_contract import MetricContract
from tests.support.stub_trials import StubTrainable, tiny_plan


class TestMetrics(MetricContract):
    @pytest.fixture(params=METRICS)
    def name(self, request):
        return request.param


class TrainableWithToyMetric(StubTrainable):
    def measure(self, directory, kept):
        measured = super().measure(directory, kept)
        return replace(measured, measurements={**measured.measurements, "toy": 2.5})


def test_a_metric_is_added_by_one_entry_of_the_table(tmp_path, monkeypatch):
    monkeypatch.setitem(METRICS, "toy", Metric("toy metric", "toys", "higher"))
    half = Metric("half a toy", "toys", derive=lambda m: m["toy"] / 2 if "toy" in m else None)
    monkeypatch.setitem(METRICS, "half_toy", half)
    trial, store = tiny_plan(tmp_path).trials[0].trial, Store(tmp_path / "runs")
    run_task(trial, store.path, make_trainable=partial(TrainableWithToyMetric, flag=""))
    result = store.result(trial.id)
    assert result["measurements"]["toy"] == 2.5
    assert "half_toy" not in result["measurements"], "derived, so not recorded"
    assert collect_metrics(result)["half_toy"] == 1.25
    sweep = {"name": "s", "factors": {"heads": ["mha"]}, "baseline": {"heads": "mha"}}
    run = describe_run(sweep, {"heads": "mha"}, result, store.trial_directory(trial.id))
    assert {name: value for name, value, _, _ in run.points if "toy" in name} == {
        "quality/toy": 2.5, "quality/half_toy": 1.25,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("recorded", "speedup"),
    [
        ({"tpot_ms_uncached_p50": 6.0, "tpot_ms_p50": 1.5}, 4.0),
        ({"tpot_ms_uncached_p50": 6.0, "tpot_ms_p50": 1.5, "cache_speedup": 9.0}, 9.0),
        ({"tpot_ms_uncached_p50": 0.0, "tpot_ms_p50": 1.5}, None),
        (None, None),
    ],
)
def test_a_metric_is_derived_where_it_applies_and_was_not_recorded(recorded, speedup, monkeypatch):
    monkeypatch.setitem(METRICS, "odd", Metric("odd", "", "lower", lambda _: float("inf")))
    before = dict(recorded or {})
    assert "odd" not in collect_metrics({"measurements": recorded}), "it is infinite"
    assert collect_metrics({"measurements": recorded}).get("cache_speedup") == speedup
    assert (recorded or {}) == before, "the result stays as it is"


def test_the_served_text_scored_one_shot():
    scored = {"loss_served": 2.5, "serving_gap": 0.5, "bits_per_byte_served": 1.25, "loss": 1.0}
    other = collect_metrics({"measurements": {**scored, "loss_tokens": 9, "served_tokens": 4}})
    assert (other["loss_paired"], other["bits_per_byte_paired"]) == (2.0, 1.0)
    same = collect_metrics({"measurements": {**scored, "loss_tokens": 4, "served_tokens": 4}})
    assert same["loss_paired"] == 1.0


def test_what_is_rounding_is_zero():
    small = {"serving_kl": 9e-11, "loss": 1e-11}
    read = collect_metrics({"measurements": small})
    assert [read[name] for name in small] == [0.0, 1e-11]
    assert collect_metrics({"measurements": {"serving_kl": 2e-10}})["serving_kl"] == 2e-10


def test_what_a_token_reads_is_of_the_layout_as_it_is_now_whatever_a_record_says():
    model = ModelConfig(n_layer=2, n_head=2, n_embd=8, block_size=16, vocab_size=32)
    experiment = {"model": model.model_dump(mode="json"), "serving": {}}
    line = {"metric": "kv_read", "batch_size": 1, "context_length": 16, "dtype": "float32"}
    result = {"measurements": {"kv_bytes_read": 5}, "experiment": experiment, "benchmark": [line]}
    assert collect_metrics(result)["kv_bytes_read"] == 2 * 2 * 16 * 8 * 4
    assert result["measurements"] == {"kv_bytes_read": 5}
    for unread in (
        {"extensions": {"own.py": "x = 1"}},
        {"serving": {"kv_dtype": "of-an-extension-that-is-not-there"}},
    ):
        kept = collect_metrics(result | {"experiment": experiment | unread})
        assert kept["kv_bytes_read"] == 5
