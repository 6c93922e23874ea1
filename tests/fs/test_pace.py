"""What is slow is done less often, once it has been slow twice."""

import pytest

from kvlab.fs import pace


@pytest.mark.parametrize(
    ("took", "waits"),
    [
        ([0.0001, 0.0001], [0.2, 0.2]),
        ([0.01, 0.01, 0.02], [0.2, 1.0, 1.0]),
        ([0.3, 0.0001, 0.3, 0.3], [0.2, 0.2, 0.2, pace.LONGEST_SECONDS]),
    ],
)
def test_a_hundredth_of_the_time_is_spent(monkeypatch, took, waits):
    now = 100.0
    monkeypatch.setattr(pace.time, "monotonic", lambda: now)
    one = pace.Pace(0.2)
    for seconds, wait in zip(took, waits, strict=True):
        assert one.is_due()
        began = now
        with one.take_time():
            now += seconds
        now = began + wait - 0.001
        assert not one.is_due() or now < began + seconds
        now = max(began + wait, began + seconds) + 0.001
