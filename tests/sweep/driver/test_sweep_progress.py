"""The pace and the remaining time of a sweep, from its record."""

import io
import os

import pytest

from kvlab.cli.progress_display import ProgressDisplay
from kvlab.sweep import Driver
from kvlab.sweep.driver import sweep_progress
from kvlab.sweep.driver.sweep_progress import estimate_pace, list_durations
from kvlab.sweep.executors.inline import InlineExecutor
from tests.support.stub_trials import StubRun

DONE = ["1" * 16, "2" * 16, "3" * 16]


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


def runs(left, tokens_per_second=None):
    return {"step": 10, "steps": 40, "seconds_left": left, "tokens_per_second": tokens_per_second}


def test_the_rest_takes_as_long_as_what_has_ended_shared_by_those_that_run(store):
    for trial, seconds in zip(DONE, (60, 120, 180), strict=True):
        done(store, trial, seconds)
    running = [runs(20.0, 1000.0), runs(10_000.0, 500.0)]
    assert estimate_pace(running, list_durations(store, DONE), missing=6) == {
        "tokens_per_second": 1500,
        "trials_per_hour": 2 * 3600 / 120,
        # 6 of 120 s; what runs has 20 s left and, of the other, no more than a whole trial
        "seconds_left": pytest.approx((6 * 120 + 20 + 120) / 2),
    }


def test_the_newest_results_are_read(store, monkeypatch):
    monkeypatch.setattr(sweep_progress, "MAX_RESULTS_READ", 2)
    for trial, seconds, ended in zip(DONE, (60, 120, 180), (5, 9, 1), strict=True):
        done(store, trial, seconds)
        os.utime(store.trial_directory(trial) / "result.json", (ended, ended))
    assert list_durations(store, DONE) == [120, 60]


def test_what_was_trained_before_a_kill_counts_and_nothing_is_guessed_from_nothing(store):
    nothing = dict.fromkeys(("tokens_per_second", "trials_per_hour", "seconds_left"))
    assert estimate_pace([{}, {}], [], missing=3) == nothing
    done(store, DONE[0], 10, attempts=3, trained=200.0)
    durations = list_durations(store, DONE)
    assert durations == [200.0]
    assert estimate_pace([{}], durations, missing=0)["trials_per_hour"] == 18
    assert estimate_pace([], durations, missing=3) == nothing, "it stands still"


def test_before_any_has_ended_a_trial_takes_what_the_running_trainings_foresee():
    pace = estimate_pace([runs(30.0), {}], [], missing=2)
    assert (pace["trials_per_hour"], pace["seconds_left"]) == (180, (2 * 40 + 30 + 20) / 2)


def test_a_trial_that_failed_is_not_counted_as_done(store, planned):
    script = {(planned.trials[0].trial.id, "measure", 0): "bug"}
    driver = Driver(planned, store, InlineExecutor(StubRun(store.path, script=script)))
    driver.run()
    display = ProgressDisplay("s", store, io.StringIO())
    assert display.format_summary(driver, []).startswith("s: 7/8 done, 1 failed, ")
