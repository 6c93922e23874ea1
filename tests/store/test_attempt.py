"""Progress: one line for people, a file for other processes, and not too often."""

import pytest

from kvlab.fs.atomic_files import read_json
from kvlab.store import attempt
from kvlab.store.attempt import ProgressReporter, format_progress


def test_one_line_of_what_there_is():
    state = {
        "stage": "training", "step": 1200, "steps": 19_073, "loss": 3.14159,
        "tokens_per_second": 45_678.9, "seconds_left": 7620,
    }  # fmt: skip
    line = "training  1,200/19,073  loss 3.1416  45,679 tokens/s  2h07m left"
    assert format_progress(state) == line
    state |= {"flops_per_second": 38.6e12, "mfu": 0.391, "peak_bytes": 21_340_000_000}
    parts = ["45,679 tokens/s", "38.6 TFLOP/s, MFU 39%", "peak 19.87 GiB", "2h07m left"]
    assert format_progress(state).endswith("  ".join(["", *parts]))
    state |= {"process_bytes": 480_000_000, "peak_bytes": 15_500_000}
    assert "  peak 14.78 MiB (process 457.8 MiB)  " in format_progress(state)
    assert format_progress({"stage": "data", "note": "reading"}) == "data  reading"
    assert format_progress({}) == "running"
    begun = {"stage": "training", "steps": 5, "loss": 0.0}
    assert format_progress(begun) == "training  0/5  loss 0.0000"


def test_a_new_stage_is_told_at_once_and_the_rest_now_and_then(tmp_path, monkeypatch):
    moment = [100.0]
    monkeypatch.setattr("kvlab.store.attempt.time.monotonic", lambda: moment[0])
    logged, told = [], []
    write = attempt.write_progress

    def tell(path, state, fence):
        told.append(state["step"])
        write(path, state, fence)

    monkeypatch.setattr(attempt, "write_progress", tell)
    report = ProgressReporter(tmp_path / "progress.json", logged.append)

    def step(number, seconds, stage="training"):
        moment[0] += seconds
        report({"stage": stage, "step": number, "steps": 9})

    step(1, 0.0)
    step(2, 0.3)
    step(3, 0.3)
    step(4, 0.1)
    assert told == [1, 3]
    assert read_json(tmp_path / "progress.json")["step"] == 3
    assert logged == ["training  1/9"]
    step(5, 10.0)
    step(0, 0.0, "evaluation")
    assert told == [1, 3, 5, 0]
    assert logged == ["training  1/9", "training  5/9", "evaluation  0/9"]


@pytest.mark.parametrize(
    ("took", "waits"),
    [
        ([0.0001, 0.0001], [0.2, 0.2]),
        ([0.01, 0.01, 0.02], [0.2, 1.0, 1.0]),
        ([0.3, 0.0001, 0.3, 0.3], [0.2, 0.2, 0.2, attempt.LONGEST_WAIT_SECONDS]),
    ],
)
def test_what_was_slow_twice_is_done_less_often(monkeypatch, took, waits):
    now = 100.0
    monkeypatch.setattr(attempt.time, "monotonic", lambda: now)
    one = attempt.Pace(0.2)
    for seconds, wait in zip(took, waits, strict=True):
        assert one.is_due()
        began = now
        with one.take_time():
            now += seconds
        now = began + wait - 0.001
        assert not one.is_due() or now < began + seconds
        now = max(began + wait, began + seconds) + 0.001
