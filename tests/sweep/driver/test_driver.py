"""The driver, with real recording and locking around trials that take no time."""

from collections import Counter

import pytest

from kvlab.errors import StoreError
from kvlab.store import Store
from kvlab.sweep import Driver, Stage, Summary
from kvlab.sweep.driver.driver import run_stages
from kvlab.sweep.driver.trial_queue import order_trials
from kvlab.sweep.executors.capacity import Capacity
from kvlab.sweep.executors.inline import InlineExecutor
from tests.support import stub_trials as stub
from tests.support.driver_process import read_logged_steps
from tests.support.stub_trials import StubRun, drive, tiny_plan


def ids(planned):
    return [one.trial.id for one in planned.trials]


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


WORKERS = "resources: {cpus: 2, workers: 2}\n"


@pytest.fixture
def shared_work(tmp_path, monkeypatch):
    """A plan whose trainings have two workers each, and what one worker measures of it."""
    calm = Store(tmp_path / "calm")
    drive(tiny_plan(tmp_path), calm, StubRun(calm.path))
    monkeypatch.setattr(stub, "EXPERIMENT", stub.EXPERIMENT + WORKERS)
    planned = tiny_plan(tmp_path, text=stub.SWEEP + "failures: {backoff_seconds: 0}\n")
    return planned, stub.read_numbers(calm, planned)


class Tasks(StubRun):
    """Note what each task asks for, and how it ends."""

    def __init__(self, store, **options):
        super().__init__(store, **options)
        self.seen = []

    def __call__(self, trial):
        outcome = super().__call__(trial)
        asked = trial.resources
        self.seen.append((trial.id, asked.cpus, asked.training_workers, outcome))
        return outcome


def test_one_worker_measures_what_several_have_trained(store, shared_work):
    planned, numbers = shared_work
    run, events = Tasks(store.path), []
    summary = drive(planned, store, run, on_event=events.append)
    assert (summary.states, summary.trials_run) == ({"done": 8, "missing": 0}, 8)
    assert stub.read_numbers(store, planned) == numbers
    trained = [task for task in run.seen if task[3] == "trained"]
    assert {task[1:3] for task in trained} == {(2, 2)}
    assert len(trained) == planned.training_count == 4, "who shares a training only measures"
    measured = [task for task in run.seen if task[3] == "done"]
    assert {task[1:3] for task in measured} == {(1, 1)}
    assert sorted(task[0] for task in measured) == sorted(ids(planned))
    assert [event.status for event in events].count("trained") == 4
    for trial in ids(planned):
        result = store.result(trial)
        attempts, pauses = (result["provenance"].get(key, 0) for key in ("attempts", "pauses"))
        assert attempts - pauses == 1, "it was not retried"
        assert result["experiment"]["resources"]["workers"] == 2, "as it was asked for"


class TwoCores(InlineExecutor):
    """A machine whose two cores are taken by one training or by two measurements."""

    def __init__(self, run):
        super().__init__(run)
        self.capacity, self.tasks = Capacity(lambda: [{"CPU": 2.0}]), []

    def has_room(self, resources):
        return self.capacity.has_room(resources, [task.resources for task in self.tasks])

    def start(self, task):
        self.tasks.append(task)

    def wait(self, seconds):
        ended = []
        while self.tasks:
            self._task = self.tasks.pop(0)
            ended += super().wait(seconds)
        return ended


def test_the_first_is_measured_at_once_and_others_once_they_fill_the_place_of_a_training(
    store, shared_work
):
    planned, _ = shared_work
    run = Tasks(store.path)
    assert Driver(planned, store, TwoCores(run)).run().states["done"] == 8
    order = "".join("t" if task[3] == "trained" else "m" for task in run.seen)
    assert order == "tmtmmtmmtmmm"


def test_a_kill_between_the_two_tasks_and_weights_lost_after_it_change_no_number(
    store, shared_work
):
    planned, numbers = shared_work
    first, second = planned.trials[0].trial, planned.trials[1].trial
    assert first.training_id != second.training_id
    for trial in (first, second):
        assert StubRun(store.path)(trial) == "trained"  # and its driver is killed
    weights = store.training_directory(second.training_id) / stub.FINAL_WEIGHTS
    weights.write_text(weights.read_text()[::-1])
    run = Tasks(store.path)
    assert drive(planned, store, run).states["done"] == 8
    assert stub.read_numbers(store, planned) == numbers
    trained = [task[0] for task in run.seen if task[3] == "trained"]
    assert len(trained) == 3, "all but the first"
    steps = read_logged_steps(store)
    assert steps[first.training_id] == list(range(1, 21))


@pytest.mark.parametrize(
    ("first", "ran", "has_more"),
    [
        (Summary(Counter(done=1, failed=1), trials_run=2), [1, 2, 3], False),
        (Summary(Counter(done=2), trials_run=2, stopped=True), [1], True),
        (Summary(Counter(done=1, missing=1), trials_run=1), [1], True),
        (Summary(Counter(failed=2), trials_run=2, halt_reason="the same error"), [1], True),
    ],
)
def test_stages_follow_each_other_unless_one_is_cut_short(planned, first, ran, has_more):
    summaries = {1: first, 2: Summary(Counter(done=3), 1), 3: Summary(Counter(done=5), 2)}
    stages, began = iter([2, 3]), []

    def run_stage(stage):
        began.append(stage.number)
        return summaries[stage.number]

    def make_stage(number):
        return Stage(planned, number=number, is_last=number == 3)

    total = run_stages(make_stage(1), run_stage, lambda: make_stage(next(stages)))
    assert began == ran
    assert total.states == summaries[ran[-1]].states
    assert total.trials_run == sum(summaries[number].trials_run for number in ran)
    assert total.has_more == has_more
