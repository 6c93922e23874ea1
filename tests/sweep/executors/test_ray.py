"""The Ray executor. All tests share one local cluster."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from kvlab.errors import ResourceError
from kvlab.store import Store
from kvlab.sweep import Driver
from kvlab.sweep.executors import make_executor
from kvlab.sweep.executors import ray as ray_executor
from tests.contracts.executor_contract import ExecutorContract, Scripted, some_trial, until_ended
from tests.support import stub_trials
from tests.support.driver_process import wait_for
from tests.support.stub_trials import StubRun, read_numbers, tiny_plan


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    return Scripted(tmp_path_factory.mktemp("scripts"))


@pytest.fixture(scope="module")
def cluster(scripts):
    others = psutil.Process().children(recursive=True)  # of tests that ran before
    executor = make_executor("ray", scripts)
    children = [p for p in psutil.Process().children(recursive=True) if p not in others]
    assert any("raylet" in process.name() for process in children)
    yield executor
    executor.close()
    assert [process for process in children if process.is_running()] == []


@pytest.mark.parametrize(
    ("message", "attempts"), [("The current node timed out during startup.", 3), ("no space", 1)]
)
def test_a_local_cluster_that_starts_too_slowly_is_started_again(
    monkeypatch, scripts, message, attempts
):
    calls = []

    def fail(**options):
        calls.append(options["_temp_dir"])
        raise Exception(message)

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(ResourceError, match=message):
        make_executor("ray", scripts)
    assert len(set(calls)) == len(calls) == attempts


ONE_TASK = """
from kvlab.sweep.executors import make_executor
from tests.contracts.executor_contract import some_trial

executor = make_executor("ray", lambda task: "done")
executor.start(some_trial(14))
while not (ended := executor.wait(1.0)):
    pass
print(ended[0].outcome)
executor.close()
"""


@pytest.mark.faults
def test_a_worker_process_that_dies_as_it_starts_is_replaced():
    environment = {**os.environ, "RAY_worker_register_timeout_seconds": "15"}  # 60 by default
    command = [sys.executable, "-c", ONE_TASK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as driver:
        try:
            wait_for(lambda: any(map(kill_worker, find_children(driver.pid))))
            answer, _ = driver.communicate(timeout=120)
        finally:
            driver.kill()
    assert answer.split()[-1] == b"done"


def find_children(pid):
    return psutil.Process(pid).children(recursive=True)


def kill_worker(process):
    """Kill ``process`` if it is a worker of Ray's; return whether it is."""
    with contextlib.suppress(psutil.Error):
        if any(Path(text).name == "default_worker.py" for text in process.cmdline()[:3]):
            process.kill()
            return True
    return False


def test_a_cluster_that_is_being_started_is_waited_for(monkeypatch, scripts, capsys):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # refuses until it listens
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(ray_executor, "LISTENER_SECONDS", 0.1)
        with pytest.raises(ResourceError, match="nothing has listened there"):
            make_executor("ray", scripts, address)
        monkeypatch.setattr(ray_executor, "LISTENER_SECONDS", 30.0)
        monkeypatch.setattr(time, "sleep", lambda _: listener.listen())
        monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was asked"))
        with pytest.raises(pytest.fail.Exception, match="Ray was asked"):
            make_executor("ray", scripts, address)
    assert f"nothing listens at {address} yet" in capsys.readouterr().err


class TestRay(ExecutorContract):
    @pytest.fixture
    def run(self, scripts):
        return scripts

    @pytest.fixture
    def executor(self, cluster):
        return cluster

    def test_trials_run_at_the_same_time(self, executor, run):
        one, two = some_trial(11, cpus=0.5), some_trial(12, cpus=0.5)
        executor.start(run.ask(one, "meet", other=two.id))
        assert executor.has_room(two.experiment.resources)
        executor.start(run.ask(two, "meet", other=one.id))
        assert {e.outcome for e in until_ended(executor, 2).values()} == {"done"}

    def test_a_kind_of_gpu_is_asked_of_ray(self, executor, monkeypatch):
        asked = []
        task = SimpleNamespace(remote=lambda trial: trial.id)
        remote = SimpleNamespace(options=lambda **options: asked.append(options) or task)
        monkeypatch.setattr(executor, "_on_gpu", remote)
        monkeypatch.setattr(executor, "_running", {})
        executor.start(some_trial(13, gpus=0.5, accelerator_type="H100"))
        assert (asked[0]["num_gpus"], asked[0]["accelerator_type"]) == (0.5, "H100")

    @pytest.mark.parametrize("workers", [1, 2])
    def test_the_driver_starts_killed_trials_again_from_their_checkpoint(
        self, executor, run, tmp_path, monkeypatch, workers
    ):
        asked = f"resources: {{cpus: {workers}, workers: {workers}}}\n"  # two: measured by one
        monkeypatch.setattr(stub_trials, "EXPERIMENT", stub_trials.EXPERIMENT + asked)
        store, calm = Store(tmp_path / "runs"), Store(tmp_path / "calm")
        planned = tiny_plan(tmp_path)
        trials = [one.trial for one in planned.trials]
        ended = {
            trials[0].id: "kill once",
            trials[3].id: "kill once",
            trials[4].id: "terminate once",
        }
        acts = [[trial, "train", 7, act] for trial, act in ended.items()]
        acts[1][1:3] = "measure", 0
        store.sweep_directory("s").mkdir(parents=True)  # where the stub notes its kills
        for trial in trials:
            run.ask(trial, "stub", store=str(store.path), acts=acts)
        events = []
        summary = Driver(planned, store, executor, on_event=events.append).run()
        assert summary.states == {"done": 8, "missing": 0}
        again = [event.planned.trial.id for event in events if event.kind == "retried"]
        assert sorted(again) == sorted(ended)
        for trial in (trials[0], trials[4]):
            assert len(store.attempts(trial.id)) - store.count_pauses(trial.id) == 2
            log = store.training_directory(trial.training_id) / "steps.log"
            assert log.read_text().split() == [str(step) for step in range(1, 21)]
        for trial in trials:
            StubRun(calm.path)(replace(trial, is_measurement=False))
            StubRun(calm.path)(replace(trial, is_measurement=workers > 1))
        assert read_numbers(store, planned) == read_numbers(calm, planned)
