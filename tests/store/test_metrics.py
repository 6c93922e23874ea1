"""The table of metrics, and metrics that are derived from others."""

import json
import re
from typing import get_args, get_type_hints

import pytest

from kvlab.spec import ModelConfig
from kvlab.store.metrics import METRICS, Metric, collect_metrics
from kvlab.track.run_description import tracked_metrics
from tests.support.record_factory import FACTORS, Record


@pytest.mark.parametrize("name", METRICS)
class TestMetrics:
    def test_name_title_direction_and_value(self, name):
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert len(name) <= 250, "MLflow's longest metric name"
        metric = METRICS[name]
        assert metric.title.strip() == metric.title != ""
        assert metric.better in get_args(get_type_hints(Metric)["better"])
        titles = [other.title for other in METRICS.values()]
        assert titles.count(metric.title) == 1, "tables tell metrics apart by their titles"
        result = json.loads(json.dumps({"measurements": {name: 0.5}}))
        assert collect_metrics(result)[name] == 0.5
        assert name not in collect_metrics({"measurements": None})


FIRST = {factor: levels[0] for factor, levels in FACTORS.items()}


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


def test_mlflow_gets_what_is_derived():
    result = Record().result(FIRST, 0, "done")
    result["measurements"] |= {"tpot_ms_uncached_p50": 6.0, "tpot_ms_p50": 1.5}
    assert ("speed/cache_speedup", 4.0, None) in {*tracked_metrics(result)}


def test_the_served_text_scored_one_shot():
    scored = {"loss_served": 2.5, "serving_gap": 0.5, "bits_per_byte_served": 1.25, "loss": 1.0}
    other = collect_metrics({"measurements": {**scored, "loss_tokens": 9, "served_tokens": 4}})
    assert (other["loss_paired"], other["bits_per_byte_paired"]) == (2.0, 1.0)
    scored |= {"bits_per_byte": 0.75, "loss_tokens": 4, "served_tokens": 4}
    same = collect_metrics({"measurements": scored})
    assert (same["loss_paired"], same["bits_per_byte_paired"]) == (1.0, 0.75), "as recorded"


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
