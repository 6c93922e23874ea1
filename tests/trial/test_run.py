"""`run_task`: what is recorded, whatever becomes of it."""

import errno
import json
import math
import os
import warnings
from dataclasses import replace

import pytest

from kvlab.errors import DataError, Diverged, MeasurementError, ResourceError, StoreError
from kvlab.fs.sealed_files import read_sealed_json
from kvlab.spec import ResourcesConfig, load_sweep
from kvlab.store import Store
from kvlab.store.provenance import Origin
from kvlab.sweep import plan
from kvlab.trial import run as task
from kvlab.trial.fingerprint import fingerprint
from kvlab.trial.run import run_task
from tests.support.stub_trials import StubTrainable, tiny_plan
from tests.support.tiny_sweep import tiny_sweep_folder


@pytest.fixture
def planned(tmp_path):
    return tiny_plan(tmp_path)


@pytest.fixture
def trial(planned):
    return planned.trials[0].trial


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


def run(trial, store, kind=StubTrainable, **options):
    """Run with a class of trainable; its flag is that of the sweep s."""
    flag = str(store.stop_flag("s"))
    make = lambda trial, report: kind(trial, report, flag=flag)  # noqa: E731
    origin = Origin(commit="c" * 40, dirty=False, command="kvlab submit s.yaml")
    return run_task(
        trial, store.path, origin=origin, stop_flags=[flag], make_trainable=make, **options
    )


def test_what_several_workers_have_trained_is_measured_by_a_second_task(store, trial):
    resources = ResourcesConfig(gpus=8.0)
    trial = replace(trial, experiment=trial.experiment.model_copy(update={"resources": resources}))
    assert run(trial, store) == "trained"
    assert store.status(trial.id) is None
    assert run(replace(trial, is_measurement=True), store) == "done"


def failing(error, stage="train"):
    class Failing(StubTrainable):
        def act(self, at, step):  # noqa: ARG002
            if at == stage:
                raise error

    return Failing


def steps(store, trial):
    return (store.training_directory(trial.training_id) / "steps.log").read_text().split()


def test_a_trial_leaves_all_of_its_record(store, trial):
    assert run(trial, store) == "done"
    directory = store.trial_directory(trial.id)
    assert sorted(os.listdir(directory)) == [
        "attempts", "items.jsonl.gz", "lock.1", "result.json", "trial.json"
    ]  # fmt: skip
    assert os.listdir(store.attempt_directory(trial.id, 1)) == ["log.txt"]
    result = store.result(trial.id)
    assert result["status"] == "done"
    assert (result["seed"], result["error"]) == (0, None)
    assert result["measurements"]["kv_bytes_formula"] == 64
    assert result["experiment"]["model"]["n_kv_head"] == trial.experiment.model.n_kv_head
    source = result["provenance"]
    assert (source["commit"], source["dirty"], source["attempts"]) == ("c" * 40, False, 1)
    assert source["data"]["digest"] == trial.data_identity
    assert json.loads(store.items_text(trial.id)) == {"ind": 1, "correct": True}
    identity = read_sealed_json(store.training_directory(trial.training_id) / "config.json")
    assert fingerprint(identity).startswith(trial.training_id)


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    ("error", "kind", "stage"),
    [
        (ValueError("x"), "bug", "train"),
        (MeasurementError("32 is not 64"), "bug", "measure"),
        (PermissionError(errno.EACCES, "Permission denied"), "bug", "train"),
        (DataError("text is gone"), "data", "train"),
        (ResourceError("no GPU"), "resources", "measure"),
        (MemoryError(), "host_memory", "train"),
        (OutOfMemoryError("on the device"), "device_memory", "measure"),
    ],
)
def test_a_failure_is_recorded_with_its_class(store, trial, error, kind, stage):
    assert run(trial, store, failing(error, stage)) == "failed"
    result = store.result(trial.id)
    assert (store.status(trial.id), result["measurements"]) == ("failed", {})
    assert result["error"] == {
        "class": kind,
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "attempts/1/traceback.txt",
    }
    trace = (store.trial_directory(trial.id) / result["error"]["traceback"]).read_text()
    assert f"in {stage}\n" in trace
    assert trace.splitlines()[-1].startswith((type(error).__name__, "kvlab.", "tests."))


@pytest.mark.parametrize(
    "wrong",
    [
        {"measurements": {"loss": float("nan")}},
        {"measurements": {"no_such_metric": 1.0}},
        {"curves": {"train_loss": [[1, 2, float("inf")]], "validation_loss": []}},
        {"items": [{"ind": 1, "loss": float("nan")}]},
        {"training_record": {"path": object()}},
    ],
)
def test_a_result_that_cannot_be_recorded_is_a_failure_with_its_traceback(store, trial, wrong):
    class Wrong(StubTrainable):
        def measure(self, directory, kept):
            return replace(super().measure(directory, kept), **wrong)

    assert run(trial, store, Wrong) == "failed"
    error = store.result(trial.id)["error"]
    assert error["class"] == "bug"
    assert (store.trial_directory(trial.id) / error["traceback"]).exists()


@pytest.mark.parametrize(
    ("code", "stage"), [(errno.ENOSPC, "train"), (errno.EDQUOT, "measure"), (errno.EROFS, "train")]
)
def test_a_full_disk_is_no_finding_about_the_trial(store, trial, code, stage):
    with pytest.raises(StoreError, match="run again"):
        run(trial, store, failing(OSError(code, "no room"), stage))
    assert store.status(trial.id) is None
    assert run(trial, store) == "done"
    assert store.attempts(trial.id) == [1, 2]


def test_a_divergence_is_a_finding_for_all_that_share_the_training(store, planned):
    first, second = planned.trials[0].trial, planned.trials[2].trial
    assert first.training_id == second.training_id
    message = "the loss is nan at step 3"
    assert run(first, store, failing(Diverged(message))) == "diverged"
    assert run(second, store, failing(ValueError("trained again"))) == "diverged"
    for trial in (first, second):
        assert store.result(trial.id)["error"]["message"] == message
        assert store.result(trial.id)["error"]["class"] == "diverged"


def stopping(stage, at=4):
    class Stopping(StubTrainable):
        def act(self, now, step):
            if (now, step) == (stage, at):
                os.makedirs(os.path.dirname(self.flag), exist_ok=True)
                open(self.flag, "w").close()
            self.seconds = 0.05  # longer than the flag is not looked at

    return Stopping


def test_a_stop_leaves_no_result_and_goes_on_from_the_checkpoint(store, trial):
    assert run(trial, store, stopping("train")) == "stopped"
    assert store.status(trial.id) is None
    assert not (store.trial_directory(trial.id) / "progress.json").exists()
    assert 4 <= len(steps(store, trial)) < 20
    assert run(trial, store) == "stopped", "the flag is still there"
    store.stop_flag("s").unlink()
    assert run(trial, store) == "done"
    assert steps(store, trial) == [str(step) for step in range(1, 21)]


def test_a_stop_is_obeyed_while_another_process_has_the_training(store, trial, monkeypatch):
    seen = []

    def stop(path, state, fence):  # noqa: ARG001
        seen.append(state["stage"])
        store.stop_flag("s").parent.mkdir(parents=True, exist_ok=True)
        store.stop_flag("s").touch()

    monkeypatch.setattr(task.attempt, "write_progress", stop)
    with store.training_lock(trial.training_id).hold():
        assert run(trial, store) == "stopped"
    assert seen == ["waiting"]
    with store.trial_lock(trial.id).hold():
        assert run(trial, store) == "stopped"
        assert run(trial, store, wait=False) == "elsewhere"
    assert store.attempts(trial.id) == [1]


@pytest.mark.parametrize(
    ("stage", "step", "lost", "then"),
    [
        ("train", 4, "trials", "goes on"),
        ("train", 4, "trainings", "fails"),
        ("measure", 0, "trials", "fails"),
        ("measure", 0, "trials", "goes on"),
        ("measure", 0, "trainings", "goes on"),
    ],
)
def test_what_another_process_has_taken_over_is_left_to_it(store, trial, stage, step, lost, then):
    class Robbed(StubTrainable):
        def act(self, now, at):
            if (now, at) == (stage, step):
                for path in store.path.glob(f"{lost}/*/lock.*"):
                    path.unlink()  # as a successor does, before anything else
                if then == "fails":
                    raise ValueError("its files went away")

    if (stage, lost) == ("measure", "trainings"):  # over and let go of
        assert run(trial, store, Robbed) == ("failed" if then == "fails" else "done")
        return
    assert run(trial, store, Robbed) == "elsewhere"
    assert store.status(trial.id) is None
    if lost == "trainings":
        assert not store.is_trained(trial.training_id)
    assert run(trial, store) == "done"


def test_what_a_trial_prints_and_warns_of_is_in_its_log(store, trial, capfd):
    class Loud(StubTrainable):
        def act(self, stage, step):  # noqa: ARG002
            if stage == "measure":
                os.write(1, b"from native code\n")
                os.system("echo from a child >&2")
                warnings.warn("something odd", stacklevel=1)

    run(trial, store, Loud, capture_output=True)
    print("afterwards")
    log = (store.attempt_directory(trial.id, 1) / "log.txt").read_text()
    for line in ("from native code", "from a child", "UserWarning: something odd"):
        assert log.count(line) == 1
    assert capfd.readouterr().out == "afterwards\n"


def files(directory):
    """Name, identity and size of every file, but for logs, which are appended to."""
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name != "log.txt")
    return {path: (path.stat().st_ino, path.stat().st_size) for path in paths}


@pytest.mark.parametrize(("lock", "stage"), [("training", "training"), ("trial", "evaluation")])
def test_nothing_is_written_after_the_lock_was_lost(tmp_path, monkeypatch, store, lock, stage):
    """By a real training: the writers alone must notice."""
    with tiny_sweep_folder(tmp_path):
        trial = plan(load_sweep(tmp_path / "s.yaml")).trials[0].trial
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(task, "STOP_CHECK_SECONDS", math.inf)
    directory = {
        "trial": store.trial_directory(trial.id),
        "training": store.training_directory(trial.training_id),
    }[lock]
    left = {}
    write = task.attempt.write_progress

    def lose_lock(path, state, fence):
        write(path, state, fence)
        if state["stage"] == stage and not left:
            (directory / "lock.1").unlink()
            left.update(files(directory))

    monkeypatch.setattr(task.attempt, "write_progress", lose_lock)
    assert run_task(trial, store.path) == "elsewhere"
    assert left
    assert files(directory) == left
    assert store.status(trial.id) is None
    assert run_task(trial, store.path) == "done"
