"""The contract of executors. The tests of each executor inherit `ExecutorContract`."""

import json
import os
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from kvlab.errors import ResourceError, StoreError
from kvlab.machine import cpu_count
from kvlab.spec import Experiment, ResourcesConfig
from kvlab.trial import Trial
from kvlab.trial.run import StopCheck
from kvlab.trial.smoke_test import SmokeResult
from tests.support.driver_process import wait_for
from tests.support.stub_trials import StubRun

EXPERIMENT = {
    "name": "x",
    "model": {"vocab_size": 257, "block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 4},
    "data": {"tokenizer": "bytes"},
    "benchmark": {"prompt_tokens": 4, "new_tokens": 4},
}
TIMEOUT_SECONDS = 240.0


class Scripted:
    """A run function that does what the file ``<folder>/<trial id>`` says, in any process."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def ask(self, trial, act, **more):
        """Script what the trial does; return the trial."""
        (self.folder / trial.id).write_text(json.dumps({"act": act, **more}))
        return trial

    def __call__(self, trial):
        script = json.loads((self.folder / trial.id).read_text())
        match script["act"]:
            case "raise":
                raise ValueError("no way")
            case "no store":
                raise StoreError("runs cannot be written: No space left on device")
            case "no memory":
                raise MemoryError
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "hang":
                should_stop = StopCheck((), ())
                for _ in range(15):  # steps, then one that never ends
                    should_stop()
                    time.sleep(0.1)
                (self.folder / f"here-{trial.id}").touch()
                time.sleep(600)
            case "meet":
                (self.folder / f"here-{trial.id}").touch()
                wait_for(lambda: (self.folder / f"here-{script['other']}").exists())
            case "answer":
                return SmokeResult(peak_bytes=5)
            case "stub":
                acts = {tuple(key): act for *key, act in script["acts"]}
                return StubRun(script["store"], script=acts)(trial)
        return "done"


def some_trial(seed, **resources):
    experiment = Experiment.model_validate({**EXPERIMENT, "resources": resources})
    return Trial.of(experiment, "text", seed)


def until_ended(executor, count=1):
    """Wait for ``count`` tasks to end; return them by id."""
    found = {}
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(found) < count and time.monotonic() < deadline:
        for ended in executor.wait(1.0):
            assert ended.task_id not in found
            found[ended.task_id] = ended
    return found


class ExecutorContract(ABC):
    """Override `run`, a `Scripted`, and `executor`, an idle executor of it."""

    @pytest.fixture
    @abstractmethod
    def run(self): ...

    @pytest.fixture
    @abstractmethod
    def executor(self, run): ...

    def test_a_trial_ends_once_with_its_outcome(self, executor, run):
        assert executor.wait(0.01) == [], "nothing has started"
        assert executor.describe().count("\n") == 0 < len(executor.describe())
        trial = run.ask(some_trial(1), "done")
        executor.start(trial)
        ended = until_ended(executor)[trial.id]
        assert (ended.outcome, ended.error) == ("done", None)
        assert executor.wait(0.01) == []

    def test_what_a_task_has_found_comes_back(self, executor, run):
        trial = run.ask(some_trial(6), "answer")
        executor.start(trial)
        assert until_ended(executor)[trial.id].outcome == SmokeResult(peak_bytes=5)

    def test_what_a_run_raises_is_told_and_the_next_one_runs(self, executor, run):
        trial = run.ask(some_trial(2), "raise")
        executor.start(trial)
        ended = until_ended(executor)[trial.id]
        assert ended.outcome is None
        assert isinstance(ended.error, ValueError)
        assert "no way" in str(ended.error)
        self.test_a_trial_ends_once_with_its_outcome(executor, run)

    def test_a_broken_store_and_no_memory_are_told_as_such(self, executor, run):
        acts = [run.ask(some_trial(3), "no store"), run.ask(some_trial(4), "no memory")]
        errors = []
        for trial in acts:
            executor.start(trial)
            errors.append(until_ended(executor)[trial.id].error)
        assert type(errors[0]) is StoreError
        assert str(errors[0]) == "runs cannot be written: No space left on device"
        assert isinstance(errors[1], MemoryError)

    def test_there_is_room_until_it_is_taken(self, executor, run):
        trial = run.ask(some_trial(5, cpus=cpu_count()), "done")
        wanted = trial.experiment.resources
        assert executor.has_room(wanted)
        executor.start(trial)
        assert not executor.has_room(wanted)
        assert until_ended(executor).keys() == {trial.id}
        assert executor.has_room(wanted)

    def test_every_machine_is_asked(self, executor):
        found = executor.run_on_all_machines(os.path.basename, "/somewhere/x")
        assert set(found.values()) == {"x"}
        (error,) = executor.run_on_all_machines(os.path.getsize, "/no/such/file").values()
        assert isinstance(error, OSError)

    def test_what_could_never_run_is_refused(self, executor):
        executor.check_requests([ResourcesConfig(), ResourcesConfig(cpus=cpu_count())])
        with pytest.raises(ResourceError, match=r"resources\.cpus = 4096"):
            executor.check_requests([ResourcesConfig(), ResourcesConfig(cpus=4096)])
        with pytest.raises(ResourceError, match=r"resources\.gpus = 1000"):
            executor.check_requests([ResourcesConfig(gpus=1000)])
        with pytest.raises(ResourceError, match=r"resources\.accelerator_type = X9"):
            executor.check_requests([ResourcesConfig(gpus=1, accelerator_type="X9")])
