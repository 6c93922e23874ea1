"""Progress of a preparation: rate and time left, also after an interruption."""

from kvlab.data import dataset_preparation
from kvlab.data.dataset_preparation import ThroughputMeter


def test_rate_and_time_left_without_the_units_of_an_earlier_run(monkeypatch):
    moment, lines = [50.0], []
    monkeypatch.setattr(dataset_preparation.time, "monotonic", lambda: moment[0])
    meter = ThroughputMeter("tokens", 2_000_000, lines.append)
    moment[0] += 0.5
    meter.add({"bytes": 1_000_000, "tokens": 200_000}, is_new=True)
    assert lines == [], "not more than one line a second"
    moment[0] += 0.5
    meter.add({"bytes": 8_000_000, "tokens": 400_000}, is_new=False)
    assert lines[0] == "tokenizing: 9.0 MB of text, 1.0 MB/s, 0.6 million tokens, about 7s left"
    moment[0] += 1
    meter.add({"bytes": 3_000_000, "tokens": 700_000}, is_new=True)
    assert lines[1] == "tokenizing: 12.0 MB of text, 2.0 MB/s, 1.3 million tokens, about 2s left"
    moment[0] += 2
    meter.add({"bytes": 0, "tokens": 700_000}, is_new=True)
    assert "left" not in lines[2]
    unknown = ThroughputMeter("bytes", None, lines.append)
    moment[0] += 2
    unknown.add({"bytes": 2_000_000, "tokens": 0}, is_new=False)
    assert lines[3] == "tokenizing: 2.0 MB of text, 0.0 million tokens"
