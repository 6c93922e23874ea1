"""Several drivers of one sweep, in processes of their own, that are killed or suspended."""

import os
import signal
import sqlite3
from contextlib import closing

import pytest

from kvlab.errors import StoreError, UsageError
from kvlab.store import Store
from kvlab.sweep.driver.driver_registry import join_sweep
from tests.support.driver_process import (
    count_logged_steps,
    finish_driver,
    list_results,
    read_logged_steps,
    start_driver,
    wait_for,
)
from tests.support.stub_trials import StubRun, drive, read_numbers, tiny_plan


def attempts(store, planned):
    return [store.attempts(one.trial.id) for one in planned.trials]


def test_a_driver_leaves_to_another_what_that_one_has(store, planned):
    summaries, events = [], []

    def run(trial):
        if not summaries:  # while the first trial is started here: the whole sweep elsewhere
            summaries.append(drive(planned, store, StubRun(store.path)))
        return StubRun(store.path)(trial)

    summary = drive(planned, store, run, on_event=events.append)
    assert (summaries[0].trials_run, summaries[0].states["done"]) == (8, 8)
    assert (summary.exit_code, summary.states["done"]) == (0, 8)
    assert attempts(store, planned) == [[1]] * 8
    assert sum(event.is_remote for event in events) == 7


def test_a_driver_that_was_suspended_overwrites_nothing(tmp_path, interrupted_sweep, monkeypatch):
    planned, store, expected = interrupted_sweep
    monkeypatch.setenv("KVLAB_LEASE_SECONDS", "1")
    sleeper = start_driver(tmp_path, "--seconds", 0.02)
    wait_for(lambda: count_logged_steps(store) >= 7)
    sleeper.send_signal(signal.SIGSTOP)
    facts = finish_driver(start_driver(tmp_path))
    assert (facts["exit"], facts["states"]["done"]) == (0, 8)
    before, steps = list_results(store, planned), read_logged_steps(store)
    sleeper.send_signal(signal.SIGCONT)
    facts = finish_driver(sleeper)
    assert (facts["exit"], facts["states"]["done"]) == (0, 8)
    assert read_numbers(store, planned) == expected
    assert list_results(store, planned) == before
    late = sum(map(len, read_logged_steps(store).values())) - sum(map(len, steps.values()))
    assert late <= 1, "the stub's log is no file that is put in place"


@pytest.mark.timeout(600)
@pytest.mark.faults
def test_eight_drivers_at_once_on_a_store_that_is_not_there(tmp_path, interrupted_sweep):
    planned, store, expected = interrupted_sweep
    drivers = [start_driver(tmp_path, "--mlflow") for _ in range(8)]
    facts = [finish_driver(driver, timeout=500) for driver in drivers]  # each imports MLflow
    assert [(one["exit"], one["states"]["done"]) for one in facts] == [(0, 8)] * 8
    assert read_numbers(store, planned) == expected
    assert attempts(store, planned) == [[1]] * 8
    with closing(sqlite3.connect(store.path / "mlflow.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        living = "select run_uuid, name, status from runs where lifecycle_stage = 'active'"
        runs = database.execute(living).fetchall()
        assert sorted(name for _, name, _ in runs) == sorted(
            ["s", *(f"{cell} seed {seed}" for cell in CELLS for seed in (0, 1))]
        )
        assert {status for _, _, status in runs} == {"FINISHED"}
        points = "select count(*) from metrics where run_uuid = ? group by key, step"
        for run, _, _ in runs:
            counts = [count for (count,) in database.execute(points, (run,))]
            assert set(counts) == {1}, "a point is there twice"


CELLS = ("baseline", "mqa", "tied", "mqa+tied")


def test_a_stop_reaches_all_drivers_and_the_next_one_goes_on(tmp_path, interrupted_sweep):
    planned, store, expected = interrupted_sweep
    drivers = [start_driver(tmp_path, "--seconds", 0.05) for _ in range(2)]
    wait_for(lambda: len(store.held_driver_locks("s")) == 2)
    wait_for(lambda: sum(len(steps) > 1 for steps in read_logged_steps(store).values()) >= 2)
    store.stop_flag("s").touch()  # as `kvlab stop` does
    assert [finish_driver(driver)["exit"] for driver in drivers] == [130, 130]
    assert not store.stop_flag("s").exists()
    assert finish_driver(start_driver(tmp_path))["states"]["done"] == 8
    assert read_numbers(store, planned) == expected
    assert not list((store.sweep_directory("s") / "drivers").iterdir())


def cell(number):
    return {"levels": {}, "trials": {"1": f"{number:016x}"}}


def describe_stage(number, **declared):
    stages = {"declared": declared, "number": number}
    return {"name": "s", "factors": {}, "cells": [cell(number)], "stages": stages}


def test_a_driver_of_the_tuning_leaves_the_looks_that_another_has_reached(store):
    tuning, look = describe_stage(1, tune="a"), describe_stage(2, tune="a", looks="b")
    with join_sweep(store, "s", tuning, exclusive=False):
        with join_sweep(store, "s", look, exclusive=False):
            pass
        with join_sweep(store, "s", tuning, exclusive=False):
            assert store.sweep("s")["stages"] == look["stages"]
        other = describe_stage(2, tune="c", looks="b")
        with (
            pytest.raises(UsageError, match="other cells than this file's"),
            join_sweep(store, "s", other, exclusive=False),
        ):
            pytest.fail("it is tuned otherwise")


def test_who_cannot_join_is_told_why(store, planned):
    described = {"name": "s", "factors": {}, "cells": [cell(1)]}
    with join_sweep(store, "s", described, exclusive=False):
        with (
            pytest.raises(UsageError, match=r"run by process \d+ since .*a search has one driver"),
            join_sweep(store, "s", None, exclusive=True),
        ):
            pytest.fail("it is not alone")
        with (
            pytest.raises(UsageError, match="other cells than this file's"),
            join_sweep(store, "s", {"name": "s", "factors": {}, "cells": []}, exclusive=False),
        ):
            pytest.fail("its plan is another")
        with join_sweep(store, "s", described, exclusive=False):
            store.stop_flag("s").touch()
        assert store.stop_flag("s").exists(), "the first has not seen it yet"
        with pytest.raises(UsageError, match="asked to stop"):
            drive(planned, store, StubRun(store.path))
    assert not store.stop_flag("s").exists()
    with (
        join_sweep(store, "s", None, exclusive=True),
        pytest.raises(UsageError, match="kvlab stop s"),
    ):
        drive(planned, store, StubRun(store.path))
    assert drive(planned, store, StubRun(store.path)).states["done"] == 8


def test_a_wait_says_for_whom_and_ends_when_nothing_moves(tmp_path, monkeypatch):
    """A holder whose heartbeat goes on, and that does nothing, is not waited for without end."""
    monkeypatch.setenv("KVLAB_STALL_SECONDS", "1")
    store, planned, events = Store(tmp_path / "runs"), tiny_plan(tmp_path), []
    stuck = planned.trials[0].trial
    with (
        store.trial_lock(stuck.id).hold(),
        pytest.raises(StoreError, match="has made no progress for 1s; end that process, or remove"),
    ):
        drive(planned, store, StubRun(store.path), on_event=events.append)
    waits = [event.message for event in events if event.kind == "waiting"]
    assert len(waits) == 1
    assert waits[0].startswith(f"process {os.getpid()} runs this trial since 2")
    assert waits[0].endswith("finishes or dies, or gives no sign of life for 60 s")
    assert sum(event.status == "done" for event in events) == 6, "the others are run first"
