"""Progress of a preparation: rate and time left, also after an interruption."""

import pytest

from kvlab.data import dataset_preparation
from kvlab.data.dataset_preparation import ThroughputMeter


@pytest.fixture
def clock(monkeypatch):
    moment = [50.0]
    monkeypatch.setattr(dataset_preparation.time, "monotonic", lambda: moment[0])
    return moment


def test_rate_and_time_left(clock):
    lines = []
    meter = ThroughputMeter("tokenizing", 100, lines.append)
    clock[0] += 0.5
    meter.add(1_000_000, 200_000, 5, is_new=True)
    assert lines == [], "not more than one line a second"
    clock[0] += 1.5
    meter.add(3_000_000, 700_000, 15, is_new=True)
    assert lines == ["tokenizing: 4.0 MB of text, 2.0 MB/s, 0.9 million tokens, about 8s left"]
    clock[0] += 2
    meter.add(0, 0, 80, is_new=True)
    assert "left" not in lines[-1]


def test_units_of_an_earlier_run_do_not_count_for_the_rate(clock):
    lines = []
    meter = ThroughputMeter("tokenizing", 100, lines.append)
    clock[0] += 2
    meter.add(8_000_000, 0, 80, is_new=False)
    assert lines == ["tokenizing: 8.0 MB of text"]
    clock[0] += 8
    meter.add(1_000_000, 0, 10, is_new=True)
    assert lines[-1] == "tokenizing: 9.0 MB of text, 0.1 MB/s, about 10s left"


def test_an_unknown_total_gives_no_time_left(clock):
    lines = []
    meter = ThroughputMeter("reading", None, lines.append)
    clock[0] += 2
    meter.add(2_000_000, 0, 0, is_new=True)
    assert lines == ["reading: 2.0 MB of text, 1.0 MB/s"]
