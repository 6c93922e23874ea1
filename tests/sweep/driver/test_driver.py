"""The driver, with real recording and locking around trials that take no time."""

import pytest

from kvlab.errors import StoreError
from kvlab.store import Store
from kvlab.sweep import Driver
from kvlab.sweep.driver.trial_queue import order_trials
from kvlab.sweep.executors.inline import InlineExecutor
from tests.support.driver_process import read_logged_steps
from tests.support.stub_trials import StubRun, drive, tiny_plan


def ids(planned):
    return [one.trial.id for one in planned.trials]


def test_every_trial_is_run_once_and_a_second_run_finds_nothing_missing(tmp_path, store, planned):
    results = []
    summary = drive(planned, store, StubRun(store.path), on_result=results.append)
    assert (summary.exit_code, summary.states["done"], summary.trials_run) == (0, 8, 8)
    assert sorted(results) == sorted(ids(planned))
    again = drive(tiny_plan(tmp_path, store), store, StubRun(store.path))
    assert (again.exit_code, again.states["done"], again.trials_run) == (0, 8, 0)
    assert all(store.attempts(trial) == [1] for trial in ids(planned))
    steps = read_logged_steps(store)  # each of the four trainings is run once
    assert steps == {one.trial.training_id: list(range(1, 21)) for one in planned.trials}


def test_failed_trials_run_again_only_when_asked_and_keep_both_attempts(tmp_path, store, planned):
    bad, wild = ids(planned)[0], ids(planned)[1]
    script = {(bad, "train", 5): "bug", (wild, "train", 3): "diverge"}
    summary = drive(planned, store, StubRun(store.path, script=script))
    assert (summary.exit_code, summary.states) == (
        1, {"done": 5, "failed": 1, "diverged": 2, "missing": 0}
    )  # fmt: skip
    error = store.result(bad)["error"]
    assert (error["class"], error["type"]) == ("bug", "ValueError")
    assert "no way to train" in (store.trial_directory(bad) / error["traceback"]).read_text()
    unasked = drive(tiny_plan(tmp_path, store), store, StubRun(store.path))
    assert (unasked.trials_run, unasked.exit_code) == (0, 1)
    summary = drive(tiny_plan(tmp_path, store), store, StubRun(store.path), retry_failed=True)
    assert (summary.trials_run, summary.exit_code, summary.states["done"]) == (1, 0, 6)
    assert store.attempts(bad) == [1, 2]
    assert (store.attempt_directory(bad, 1) / "result.json").exists()
    assert store.result(bad)["provenance"]["attempts"] == 2


def test_a_broken_store_stops_the_sweep_and_loses_nothing(tmp_path, store, planned):
    order = [one.trial.id for one in order_trials(planned.trials)]
    broken = order[3]

    def run(trial):
        if trial.id == broken:
            raise StoreError("runs cannot be written: No space left on device")
        return StubRun(store.path)(trial)

    with pytest.raises(StoreError, match="No space left"):
        drive(planned, store, run)
    assert [store.status(trial) for trial in order] == ["done"] * 3 + [None] * 5
    assert drive(tiny_plan(tmp_path, store), store, StubRun(store.path)).states["done"] == 8


def test_a_stop_ends_the_preparation_and_one_before_it_starts_nothing(tmp_path, store):
    early = Driver(tiny_plan(tmp_path), store, InlineExecutor(StubRun(store.path)))
    early.stop()
    assert not store.path.exists()
    assert early.run().exit_code == 130

    def before(missing, check_stop):  # noqa: ARG001
        store.stop_flag("s").touch()  # as `kvlab stop` does
        check_stop()
        pytest.fail("it should have ended")

    summary = drive(tiny_plan(tmp_path), store, StubRun(store.path), prepare=before)
    assert summary.trials_run == 0
    assert (summary.exit_code, summary.states["missing"]) == (130, 8)
    assert not store.stop_flag("s").exists()


def test_workers_that_write_somewhere_else_are_noticed(tmp_path):
    store, elsewhere = Store(tmp_path / "runs"), Store(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="must share the store"):
        drive(tiny_plan(tmp_path), store, StubRun(elsewhere.path))
