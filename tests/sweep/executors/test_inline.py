"""The inline executor, and another one that is added by a class and a line of the table."""

import json
import multiprocessing
from types import SimpleNamespace

import psutil
import pytest
import torch

from kvlab.cli.commands import submit
from kvlab.errors import ResourceError, WorkerKilled
from kvlab.spec import ResourcesConfig
from kvlab.sweep import plan_stage
from kvlab.sweep.executors import make_executor
from tests.contracts.executor_contract import ExecutorContract, Scripted, some_trial
from tests.support.driver_process import wait_for
from tests.support.stub_looks import KnownRun
from tests.support.tiny_sweep import run_kvlab, tiny_sweep_folder


class TestInline(ExecutorContract):
    @pytest.fixture
    def run(self, tmp_path):
        return Scripted(tmp_path)

    @pytest.fixture
    def executor(self, run):
        return make_executor("inline", run)

    def test_an_interrupt_is_not_an_end_of_the_trial(self, run):
        def interrupted(_):
            raise KeyboardInterrupt

        executor = make_executor("inline", interrupted)
        executor.start(run.ask(some_trial(1), "done"))
        with pytest.raises(KeyboardInterrupt):
            executor.wait(1.0)
        assert executor.wait(1.0) == []

    def test_a_task_on_a_gpu_has_a_process_of_its_own(self, executor, run):
        ended = []
        for act in ("done", "raise", "kill"):
            executor.start(run.ask(some_trial(1, gpus=1), act))
            ended += executor.wait(1.0)
        done, raised, killed = ended
        assert done.outcome == "done"
        assert isinstance(raised.error, ValueError)
        assert isinstance(killed.error, WorkerKilled)
        assert "-9" in str(killed.error)

    def test_the_kind_of_gpu_is_read_from_its_name(self, executor, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-40GB")
        for kind in ("A100", "A100-40G"):
            executor.check_requests([ResourcesConfig(gpus=1, accelerator_type=kind)])
        for kind in ("H100", "A100-80G", "A10"):
            with pytest.raises(ResourceError, match=f"accelerator_type = {kind} fit no machine"):
                executor.check_requests([ResourcesConfig(gpus=1, accelerator_type=kind)])

    def test_a_process_for_a_gpu_ends_with_the_driver(self, run):
        trial = run.ask(some_trial(1, gpus=1), "meet", other="nobody")
        driver = multiprocessing.get_context("spawn").Process(
            target=wait_for_trial, args=(run, trial)
        )
        driver.start()
        wait_for(lambda: (run.folder / f"here-{trial.id}").exists())
        processes = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        assert psutil.wait_procs(processes, timeout=20)[1] == []


def wait_for_trial(run, trial):
    executor = make_executor("inline", run)
    executor.start(trial)
    executor.wait(1.0)


def test_the_time_of_a_sweep_is_with_that_of_its_plan(tmp_path, monkeypatch):
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds)

    def slow_plan(*args, **options):
        clock.seconds += 58.0
        return plan_stage(*args, **options)

    monkeypatch.setattr(submit, "time", clock)
    monkeypatch.setattr(submit, "plan_stage", slow_plan)
    monkeypatch.setattr(submit, "run_task", lambda task, store, **_: KnownRun(store)(task))
    command = ["submit", "s.yaml", "--no-report", "--executor", "inline"]
    with tiny_sweep_folder(tmp_path):
        code, out, error = run_kvlab(*command)
        assert code == 0, error
        assert "2 done, 0 failed in 58s" in out
        record = json.loads((tmp_path / "runs" / "sweeps" / "s" / "sweep.json").read_text())
        assert record["command"].endswith("--executor inline")
        code, _, error = run_kvlab(*command, "--address", "auto")
        assert (code, "needs --executor ray" in error) == (2, True)
