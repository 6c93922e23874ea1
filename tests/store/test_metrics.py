"""Metrics that follow from others."""

import pytest

from kvlab.store.metrics import METRICS, Metric, collect_metrics


def test_the_speed_that_the_cache_buys():
    found = collect_metrics({"measurements": {"tpot_ms_uncached_p50": 6.0, "tpot_ms_p50": 1.5}})
    assert found["cache_speedup"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    "recorded", [None, {}, {"tpot_ms_p50": 1.5}, {"tpot_ms_uncached_p50": 0.0}]
)
def test_what_does_not_apply_is_left_out(recorded):
    assert "cache_speedup" not in collect_metrics({"measurements": recorded})


def test_what_is_recorded_wins_and_the_record_is_not_touched():
    result = {
        "measurements": {"tpot_ms_uncached_p50": 6.0, "tpot_ms_p50": 1.5, "cache_speedup": 9.0}
    }
    assert collect_metrics(result)["cache_speedup"] == 9.0
    plain = {"measurements": {"tpot_ms_uncached_p50": 6.0, "tpot_ms_p50": 1.5}}
    collect_metrics(plain)
    assert "cache_speedup" not in plain["measurements"]


def test_infinite_numbers_are_left_out(monkeypatch):
    monkeypatch.setitem(METRICS, "odd", Metric("odd", "", "lower", lambda _: float("inf")))
    assert "odd" not in collect_metrics({"measurements": {}})
