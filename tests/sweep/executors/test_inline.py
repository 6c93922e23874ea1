"""The inline executor, and another one that is added by a class and a line of the table."""

import multiprocessing

import psutil
import pytest
import torch

from kvlab.errors import ResourceError, WorkerKilled
from kvlab.spec import ResourcesConfig
from kvlab.sweep.executors import make_executor
from tests.contracts.executor_contract import ExecutorContract, Scripted, some_trial
from tests.support.driver_process import wait_for


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
        for act in ("done", "raise", "kill", "terminate"):
            executor.start(run.ask(some_trial(1, gpus=1), act))
            ended += executor.wait(1.0)
        done, raised, killed, terminated = ended
        assert done.outcome == "done"
        assert isinstance(raised.error, ValueError)
        assert isinstance(killed.error, WorkerKilled)
        assert "-9" in str(killed.error)
        assert isinstance(terminated.error, WorkerKilled)
        assert "SIGTERM" in str(terminated.error), "it went on to the next place to stop"

    def test_a_task_on_a_gpu_that_makes_no_progress_is_ended(self, executor, run, monkeypatch):
        monkeypatch.setenv("KVLAB_STALL_SECONDS", "1")
        trial = run.ask(some_trial(1, gpus=1), "hang")
        executor.start(trial)
        (ended,) = executor.wait(1.0)
        assert (run.folder / f"here-{trial.id}").exists(), "it worked for longer than the limit"
        assert isinstance(ended.error, WorkerKilled)
        assert str(ended.error) == "its process made no progress for 1 s"

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
        fork = multiprocessing.get_context("fork")
        driver = fork.Process(target=wait_for_trial, args=(run, trial))
        driver.start()
        wait_for(lambda: (run.folder / f"here-{trial.id}").exists())
        processes = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        assert psutil.wait_procs(processes, timeout=20)[1] == []


def wait_for_trial(run, trial):
    executor = make_executor("inline", run)
    executor.start(trial)
    executor.wait(1.0)
