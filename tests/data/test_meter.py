"""Progress of a preparation: an honest rate and time left, after an interruption too."""

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
    of = ThroughputMeter("tokenising", 100, lines.append)
    clock[0] += 0.5
    of.add(1_000_000, 200_000, 5, is_new=True)
    assert lines == [], "not more than one line a second"
    clock[0] += 1.5
    of.add(3_000_000, 700_000, 15, is_new=True)
    assert lines == ["tokenising: 4.0 MB of text, 2.0 MB/s, 0.9 million tokens, about 8 s left"]
    clock[0] += 2
    of.add(0, 0, 80, is_new=True)
    assert "left" not in lines[-1]


def test_what_an_earlier_run_left_is_done_but_no_speed_of_this_one(clock):
    lines = []
    of = ThroughputMeter("tokenising", 100, lines.append)
    clock[0] += 2
    of.add(8_000_000, 0, 80, is_new=False)
    assert lines == ["tokenising: 8.0 MB of text"]
    clock[0] += 8
    of.add(1_000_000, 0, 10, is_new=True)
    assert lines[-1] == "tokenising: 9.0 MB of text, 0.1 MB/s, about 10 s left"


@pytest.mark.parametrize(("left", "text"), [(119, "119 s"), (600, "10 min"), (9000, "2.5 h")])
def test_long_times_in_long_units(clock, left, text):
    lines = []
    of = ThroughputMeter("reading", 1 + left / 10, lines.append)
    clock[0] += 10
    of.add(1, 0, 1, is_new=True)
    assert lines[0].endswith(f"about {text} left")


def test_an_unknown_total_promises_nothing(clock):
    lines = []
    of = ThroughputMeter("reading", None, lines.append)
    clock[0] += 2
    of.add(2_000_000, 0, 0, is_new=True)
    assert lines == ["reading: 2.0 MB of text, 1.0 MB/s"]
