"""Fractions of a GPU on a Ray cluster. Ray is told of a GPU; nothing runs on it."""

import os
import subprocess
import sys

import pytest

from kvlab.layout.gpu_sharing import device_share
from kvlab.sweep.executors import make_executor
from tests.contracts.executor_contract import Scripted, some_trial, until_ended
from tests.support.ray_head import ROOT, ray_head


@pytest.mark.faults  # a cluster of its own takes 15 seconds
def test_as_many_trials_as_share_a_gpu_run_at_once_and_no_more(tmp_path):
    with ray_head("--num-gpus=1") as head:
        # in a process of its own: Ray keeps for good how the first cluster wanted its token
        subprocess.run(
            [sys.executable, "-m", "tests.sweep.executors.test_shares", head, tmp_path],
            cwd=ROOT,
            check=True,
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            timeout=200,
        )


def share(address, folder):
    run = Scripted(folder)
    executor = make_executor("ray", run, address)
    try:
        assert executor.describe() == f"Ray at {address}, 2 CPUs, 1 GPUs"
        part = device_share(3)
        trials = [some_trial(seed, cpus=0.5, gpus=part) for seed in range(3)]
        resources = trials[0].experiment.resources
        executor.check_requests([resources])
        for index, trial in enumerate(trials):  # each waits until the next one is there too
            assert executor.has_room(resources)
            executor.start(run.ask(trial, "meet", other=trials[(index + 1) % 3].id))
        assert not executor.has_room(resources)
        assert executor.has_room(some_trial(4, cpus=0.5).experiment.resources)
        assert {ended.outcome for ended in until_ended(executor, 3).values()} == {"done"}
        assert executor.has_room(resources)
    finally:
        executor.close()


if __name__ == "__main__":
    share(*sys.argv[1:])
