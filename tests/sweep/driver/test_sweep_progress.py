"""The pace and the remaining time of a sweep, from its record."""

import io
from types import SimpleNamespace

import pytest

from kvlab.cli.progress_display import ProgressDisplay
from kvlab.fs.atomic_files import write_json
from kvlab.sweep.driver import sweep_progress
from kvlab.sweep.driver.sweep_progress import Event, RemainingTime, estimate_pace
from tests.support.stub_trials import StubRun, drive

DONE, RUNNING = ["1" * 16, "2" * 16, "3" * 16], ["a" * 16, "b" * 16]


def done(store, trial, seconds, *, attempts=1, trained=0.0):
    facts = {
        "provenance": {
            "started": "2026-01-01T00:00:00Z",
            "finished": f"2026-01-01T00:{seconds // 60:02}:{seconds % 60:02}Z",
            "attempts": attempts,
        },
        "training_record": {"seconds": trained},
    }
    store.write_result({"trial": trial, "training": trial, "status": "done", **facts})


def runs(store, trial, **state):
    write_json(store.trial_directory(trial) / "progress.json", {"stage": "training", **state})


def test_the_rest_takes_as_long_as_what_has_ended_shared_by_those_that_run(store):
    for trial, seconds in zip(DONE, (60, 120, 180), strict=True):
        done(store, trial, seconds)
    runs(store, RUNNING[0], tokens_per_second=1000.0, seconds_left=20.0)
    runs(store, RUNNING[1], tokens_per_second=500.0, seconds_left=10_000.0)
    assert estimate_pace(store, DONE, RUNNING, missing=6) == {
        "tokens_per_second": 1500,
        "trials_per_hour": 2 * 3600 / 120,
        # 6 of 120 s; what runs has 20 s left and, of the other, no more than a whole trial
        "seconds_left": pytest.approx((6 * 120 + 20 + 120) / 2),
    }


def test_what_was_trained_before_a_kill_counts_and_nothing_is_guessed_from_nothing(store):
    nothing = dict.fromkeys(("tokens_per_second", "trials_per_hour", "seconds_left"))
    assert estimate_pace(store, [], RUNNING, missing=3) == nothing
    done(store, DONE[0], 10, attempts=3, trained=200.0)
    assert estimate_pace(store, DONE[:1], RUNNING[:1], missing=0)["trials_per_hour"] == 18
    assert estimate_pace(store, DONE[:1], [], missing=3) == nothing, "it stands still"


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    times = SimpleNamespace(monotonic=lambda: now.seconds, time=lambda: 0.0)
    monkeypatch.setattr(sweep_progress, "time", times)
    return now


def test_the_time_left_follows_what_runs_and_counts_no_failure(store, planned, clock):
    """Four trials train, and each has another that shares its training."""
    trains = [one for one in planned.trials if one.trains]
    left = RemainingTime(list(planned.trials), store)
    assert left.seconds_left() is None
    left.handle_event(Event("started", trains[0]))
    clock.seconds = 20.0
    runs(store, trains[0].trial.id, seconds_left=180.0)
    assert left.seconds_left() == 180 + 3 * 200 + 4 * 200, "nothing is known of measuring alone"
    left.handle_event(Event("ended", trains[0], "failed", 20.0))
    assert left.seconds_left() is None, "a failure says nothing"
    left.handle_event(Event("started", trains[1]))
    left.handle_event(Event("ended", trains[1], "done", 100.0))
    assert left.seconds_left() == 2 * 100 + 4 * 100
    left.handle_event(Event("started", trains[2]))
    clock.seconds += 1000.0
    assert left.seconds_left() == 100 + 100 + 4 * 100, "what takes longer than others is not over"
    runs(store, trains[2].trial.id, seconds_left=5000.0)
    left.handle_event(Event("started", trains[3]))
    assert left.seconds_left() == 5000, "two run at once, and one of them for so long"


def test_a_trial_that_failed_is_not_counted_as_done(store, planned):
    display = ProgressDisplay(planned, store, io.StringIO())
    script = {(planned.trials[0].trial.id, "measure", 0): "bug"}
    drive(planned, store, StubRun(store.path, script=script), on_event=display.handle_event)
    assert display.format_summary().startswith("s: 7/8 done, 1 failed, ")
