"""Several drivers of one sweep, in processes of their own, that are stopped, killed or suspended."""

import itertools
import json
import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from kvlab.errors import StoreError, UsageError
from kvlab.fs import lease
from kvlab.store import Store
from kvlab.sweep.driver.driver_registry import SAME_REQUEST_SECONDS, join_sweep
from tests.support.chaos_processes import lives, title
from tests.support.driver_process import (
    TIMEOUT_SECONDS,
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
    remote = [e for e in events if e.kind == "ended" and e.seconds is None]
    assert len(remote) == 7


def test_a_driver_does_not_retry_what_has_failed_in_another(store, planned):
    last = planned.trials[-1].trial

    def run(trial):
        if store.result(last.id) is None:  # while the first trial is started here
            StubRun(store.path, script={(last.id, "measure", 0): "memory"})(last)
        return StubRun(store.path)(trial)

    summary = drive(planned, store, run)
    assert (summary.states["done"], summary.states["failed"]) == (7, 1)
    assert store.attempts(last.id) == [1]


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
def test_four_drivers_at_once_on_a_store_that_is_not_there(tmp_path, interrupted_sweep):
    planned, store, expected = interrupted_sweep
    drivers = [start_driver(tmp_path, "--mlflow") for _ in range(4)]
    facts = [finish_driver(driver, timeout=500) for driver in drivers]  # each imports MLflow
    assert [(one["exit"], one["states"]["done"]) for one in facts] == [(0, 8)] * 4
    assert read_numbers(store, planned) == expected
    assert attempts(store, planned) == [[1]] * 8
    with closing(sqlite3.connect(store.path / "mlflow.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        living = "select name, status from runs where lifecycle_stage = 'active'"
        cells = ("baseline", "mqa", "tied", "mqa+tied")
        names = ["s", *(f"{cell} seed {seed}" for cell in cells for seed in (0, 1))]
        assert sorted(database.execute(living)) == sorted((name, "FINISHED") for name in names)


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_at_a_checkpoint(tmp_path, interrupted_sweep, number):
    planned, store, expected = interrupted_sweep
    driver = start_driver(tmp_path, "--seconds", 0.02)
    wait_for(lambda: count_logged_steps(store) >= 25)
    driver.send_signal(number)
    facts = finish_driver(driver)
    assert facts["exit"] == 130
    assert 0 < facts["states"]["missing"] < 8
    assert not store.stop_flag("s").exists()
    assert finish_driver(start_driver(tmp_path))["exit"] == 0
    assert read_numbers(store, planned) == expected
    assert set(map(tuple, read_logged_steps(store).values())) == {tuple(range(1, 21))}


def test_the_second_signal_ends_it_at_once_and_nothing_is_lost(tmp_path, interrupted_sweep):
    planned, store, expected = interrupted_sweep
    first = planned.trials[0].trial.id
    driver = start_driver(tmp_path, "--script", json.dumps([[0, "train", 5, "hang"]]))
    wait_for(lambda: count_logged_steps(store) == 5)
    driver.send_signal(signal.SIGINT)
    wait_for(lambda: list(store.sweep_directory("s").glob("drivers/*.stop")))
    driver.send_signal(signal.SIGTERM)  # of the same request
    time.sleep(SAME_REQUEST_SECONDS)
    assert driver.poll() is None
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=TIMEOUT_SECONDS)
    assert driver.returncode != 0
    assert (store.status(first), store.is_driven("s")) == (None, False)
    assert finish_driver(start_driver(tmp_path))["states"]["done"] == 8
    assert read_numbers(store, planned) == expected
    assert set(map(tuple, read_logged_steps(store).values())) == {tuple(range(1, 21))}


@pytest.mark.faults
def test_a_killed_driver_takes_its_cluster_with_it_and_the_next_goes_on(
    tmp_path, interrupted_sweep
):
    planned, store, expected = interrupted_sweep
    driver = start_driver(tmp_path, "--executor", "ray", "--seconds", 0.05)
    wait_for(lambda: count_logged_steps(store) >= 10)
    family = psutil.Process(driver.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in family)
    driver.kill()
    driver.communicate()
    wait_for(lambda: not any(map(lives, family)))
    before, steps = list_results(store, planned), count_logged_steps(store)
    assert steps < 80
    assert all(not store.is_running(one.trial.id) for one in planned.trials)
    again = start_driver(tmp_path, "--executor", "ray", "--seconds", 0.05)
    wait_for(lambda: count_logged_steps(store) >= 30)
    os.killpg(again.pid, signal.SIGINT)  # as Ctrl-C at a terminal: to the workers too
    facts = finish_driver(again)
    assert (facts["exit"], facts["retried"]) == (130, 0)
    assert finish_driver(start_driver(tmp_path))["states"]["done"] == 8
    assert read_numbers(store, planned) == expected
    assert list_results(store, planned).items() >= before.items()
    assert all(done == sorted(set(done)) for done in read_logged_steps(store).values())


@pytest.mark.faults
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_driver_whose_cluster_dies_begins_it_again(tmp_path, interrupted_sweep, name):
    planned, store, expected = interrupted_sweep
    driver = start_driver(tmp_path, "--executor", "ray", "--seconds", 0.2)
    wait_for(lambda: count_logged_steps(store) >= 10)
    children = psutil.Process(driver.pid).children()
    [daemon] = find_daemons(driver, name)
    daemon.kill()
    wait_for(lambda: any(one != daemon for one in find_daemons(driver, name)))
    facts = finish_driver(driver)
    assert (facts["exit"], facts["states"]) == (0, {"done": 8, "missing": 0})
    assert read_numbers(store, planned) == expected
    wait_for(lambda: not any(map(lives, children)))


def find_daemons(driver, name):
    children = psutil.Process(driver.pid).children()
    return [one for one in children if Path(title(one).split(" ")[0]).name == name]


def describe(number, **declared):
    """Describe a sweep of one cell, with a stage of this number if anything is declared."""
    cells = [{"levels": {}, "trials": {"1": f"{number:016x}"}}]
    stages = {"stages": {"declared": declared, "number": number}} if declared else {}
    return {"name": "s", "factors": {}, "cells": cells, **stages}


def refused(store, match, description=None, *, exclusive=False):
    """Check that a driver which would join now is refused."""
    with (
        pytest.raises(UsageError, match=match),
        join_sweep(store, "s", description, exclusive=exclusive),
    ):
        pytest.fail("it has joined")


def test_a_driver_of_the_tuning_leaves_the_looks_that_another_has_reached(store):
    tuning, look = describe(1, tune="a"), describe(2, tune="a", looks="b")
    with join_sweep(store, "s", tuning, exclusive=False):
        with join_sweep(store, "s", look, exclusive=False):
            pass
        with join_sweep(store, "s", tuning, exclusive=False):
            assert store.sweep("s")["stages"] == look["stages"]
        refused(store, "other cells than this file's", describe(2, tune="c", looks="b"))


def test_who_cannot_join_is_told_why(store, planned):
    with join_sweep(store, "s", describe(1), exclusive=False):
        refused(store, r"run by process \d+ since .*a search has one driver", exclusive=True)
        refused(store, "other cells than this file's", describe(2))
        this, other = ({"code": {"training": text, "measurement": "m"}} for text in "ab")
        store.write_sweep(describe(1) | this)
        refused(store, "with other code than this; .* --code mix", describe(1) | other)
        for code in ({}, this):
            with join_sweep(store, "s", describe(1) | code, exclusive=False):
                pass
        (store.sweep_directory("s") / "sweep.json").unlink()  # then who joins writes it again
        with join_sweep(store, "s", describe(1), exclusive=False):
            assert store.sweep("s")["cells"] == describe(1)["cells"]
            store.stop_flag("s").touch()
        assert store.stop_flag("s").exists(), "the first has not seen it yet"
        refused(store, "asked to stop")
    assert not store.stop_flag("s").exists()
    with join_sweep(store, "s", None, exclusive=True):
        refused(store, "kvlab stop s")
    assert drive(planned, store, StubRun(store.path)).states["done"] == 8


@pytest.mark.parametrize("work", ["this trial", "its training"])
def test_a_wait_says_for_whom_and_ends_when_nothing_moves(tmp_path, monkeypatch, work):
    """A holder whose heartbeat goes on, and that does nothing, is not waited for without end."""
    monkeypatch.setenv("KVLAB_STALL_SECONDS", "1")
    store, planned, events = Store(tmp_path / "runs"), tiny_plan(tmp_path), []
    stuck = planned.trials[0].trial
    trial, training = store.trial_lock(stuck.id), store.training_lock(stuck.training_id)
    with (
        (trial if work == "this trial" else training).hold(),
        pytest.raises(StoreError, match="has made no progress for 1s; end that process, or remove"),
    ):
        drive(planned, store, StubRun(store.path), on_event=events.append)
    waits = [event.message for event in events if event.kind == "waiting"]
    assert len(waits) == 1
    assert waits[0].startswith(f"process {os.getpid()} runs {work} since 2")
    assert waits[0].endswith("finishes or dies, or gives no sign of life for 60 s")
    assert sum(event.status == "done" for event in events) == 6, "the others are run first"


def test_the_driver_of_a_lost_machine_keeps_no_other_out(store, monkeypatch):
    """As when Slurm requeues a job after its node has failed: what it left seems held for long."""
    monkeypatch.setenv("KVLAB_LEASE_SECONDS", "1")
    identity = lease.process_identity()
    with join_sweep(store, "s", None, exclusive=True):
        left = [store.held_driver_locks("s")[0].path, store.sweep_directory("s") / "alone"]
        files = [Path(lease.lease_path(path, 1)) for path in left]
        texts = [file.read_text().replace(f'"{identity["boot"]}"', '"far"') for file in files]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    store.stop_flag("s").touch()
    assert store.is_driven("s")
    with join_sweep(store, "s", None, exclusive=True):
        assert not store.stop_flag("s").exists()
    living, beats = Path(lease.lease_path(left[0], 9)), itertools.count()

    def beat(_):
        living.write_text(texts[0].replace(f"{0:012d}", f"{next(beats):012d}"))

    beat(0)
    monkeypatch.setattr(time, "sleep", beat)
    refused(store, "a search has one driver", exclusive=True)
    assert next(beats) == 2, "one sign of life is enough"
