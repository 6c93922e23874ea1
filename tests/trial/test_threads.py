"""Threads of a trial on CPU: as many as its cores, in torch, OpenMP and MKL alike."""

import os
import re
import subprocess
import sys

import pytest

SHOW = """
import sys
from kvlab.spec import Experiment
from kvlab.trial.stages import set_up_device
experiment = Experiment.model_validate({
    "name": "x",
    "model": {"vocab_size": 257, "block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 4},
    "data": {"tokenizer": "bytes"},
    "benchmark": {"prompt_tokens": 4, "new_tokens": 4},
    "resources": {"cpus": float(sys.argv[1])},
})
print(set_up_device(experiment.resources, 0))
import torch
print(torch.get_num_threads())
print(torch.__config__.parallel_info())
"""


@pytest.mark.parametrize(("cpus", "threads"), [("1", 1), ("2.5", 2), ("0.5", 1), ("3", 3)])
def test_torch_openmp_and_mkl_have_the_trials_cores(cpus, threads):
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", SHOW, cpus],
        capture_output=True,
        text=True,
        check=True,
        env={**environment, "OMP_NUM_THREADS": "7"},  # whatever the worker was started with
    )
    machine, own, *rest = done.stdout.splitlines()
    assert f"threads={threads}," in machine
    assert int(own) == threads
    info = "\n".join(rest)
    assert re.search(rf"omp_get_max_threads\(\) : {threads}\b", info), info
    if "mkl_get_max_threads() : " in info:
        assert re.search(rf"mkl_get_max_threads\(\) : {threads}\b", info), info
