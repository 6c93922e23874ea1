"""Progress of a preparation: rate and time left, also after an interruption."""

from kvlab.data import dataset_preparation
from kvlab.data.dataset_preparation import ThroughputMeter


def test_rate_and_time_left_without_the_units_of_an_earlier_run(monkeypatch):
    moment, lines = [50.0], []
    monkeypatch.setattr(dataset_preparation.time, "monotonic", lambda: moment[0])
    meter = ThroughputMeter(100, lines.append)
    moment[0] += 0.5
    meter.add(1_000_000, 200_000, 5, is_new=True)
    assert lines == [], "not more than one line a second"
    moment[0] += 0.5
    meter.add(8_000_000, 0, 60, is_new=False)
    assert lines[0] == "tokenizing: 9.0 MB of text, 1.0 MB/s, 0.2 million tokens, about 7s left"
    moment[0] += 1
    meter.add(3_000_000, 700_000, 15, is_new=True)
    assert lines[1] == "tokenizing: 12.0 MB of text, 2.0 MB/s, 0.9 million tokens, about 2s left"
    moment[0] += 2
    meter.add(0, 0, 20, is_new=True)
    assert "left" not in lines[2]
    unknown = ThroughputMeter(None, lines.append)
    moment[0] += 2
    unknown.add(2_000_000, 0, 0, is_new=False)
    assert lines[3] == "tokenizing: 2.0 MB of text, 0.0 million tokens"
