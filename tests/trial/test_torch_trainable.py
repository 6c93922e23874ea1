"""Training and measurement with torch: the device, memory share and threads that are set up, and
what a result says about its timings. CUDA is faked where there is none."""

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvlab.benchmark.benchmark_stage import BenchmarkResult
from kvlab.errors import ResourceError
from kvlab.layout.gpu_sharing import CONTEXT_BYTES
from kvlab.spec import Experiment
from kvlab.store.provenance import Machine, Origin, build_provenance, describe_device
from kvlab.store.result import describe_kv
from kvlab.trial.torch_trainable import TorchTrainable, keep_compiled_code, set_up_device

MEMORY = 80 * 10**9


def experiment(**resources):
    return Experiment.model_validate(
        {"name": "x", "model": {"vocab_size": 257, "block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 4},
         "data": {"tokenizer": "bytes"}, "evaluation": {"loss_tokens": 8, "served": False}, "benchmark": {"prompt_tokens": 4, "new_tokens": 4},
         "resources": resources}
    )  # fmt: skip


@pytest.fixture
def limits(monkeypatch):
    """A device that is not there, and the limits that were set on it."""
    recorded_calls = []
    facts = SimpleNamespace(total_memory=MEMORY, uuid="GPU-1")
    for name, fake in {
        "is_available": lambda: True,
        "get_device_properties": lambda _: facts,
        "get_device_name": lambda: "a device",
        "set_per_process_memory_fraction": recorded_calls.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(
        "kvlab.trial.torch_trainable.start_mps", lambda: recorded_calls.append("mps")
    )
    return recorded_calls


@pytest.mark.parametrize("gpus", [0.5, 0.25, 0.1])
def test_a_trial_may_allocate_its_part_less_what_its_process_takes(limits, gpus):
    device, machine = set_up_device(experiment(gpus=gpus).resources, 0)
    assert (device, machine.device) == ("cuda", "a device")
    assert limits == ["mps", pytest.approx(gpus - CONTEXT_BYTES / MEMORY)]


def test_a_device_of_its_own_has_no_limit_and_a_part_that_no_process_fits_is_refused(limits):
    set_up_device(experiment(gpus=0.0).resources, 0)
    assert limits == []
    set_up_device(experiment(gpus=0.5).resources, 0)
    set_up_device(experiment(gpus=1.0).resources, 0)
    assert limits[-1] == 1.0, "that of the trial before it is lifted"
    with pytest.raises(ResourceError, match=r"resources.gpus = 0.005 of 74.51 GiB is less than"):
        set_up_device(experiment(gpus=0.005).resources, 0)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    ("gpus", "training", "asked", "expected"),
    [
        (1.0, "bfloat16", "training", "bfloat16"),
        (1.0, "bfloat16", "float32", "float32"),
        (1.0, "float32", "training", "float32"),
        (0.0, "bfloat16", "training", "float32"),
    ],
)
def test_on_a_gpu_weights_are_measured_in_the_trainings_precision(gpus, training, asked, expected):
    facts = experiment(gpus=gpus).model_dump(mode="json")
    facts["training"]["precision"], facts["evaluation"]["precision"] = training, asked
    one = Experiment.model_validate(facts)
    device, machine = set_up_device(one.resources, 0)
    assert one.weight_dtype(device) == expected
    machine = replace(machine, weights=one.weight_dtype(device))
    provenance = build_provenance(Origin(), started="", attempts=1, machine=machine)
    assert provenance.get("weights", "float32") == expected
    named = expected != "float32"
    assert ("weights in bfloat16" in describe_device(provenance)) == named
    assert describe_kv(one, expected)["bytes_per_token"] == (16 if named else 32)


def test_torch_has_the_trials_cores():
    before = torch.get_num_threads()
    try:
        _, machine = set_up_device(experiment(cpus=2.5).resources, 0)
        assert (machine.threads, torch.get_num_threads()) == (2, 2)
    finally:
        torch.set_num_threads(before)


def test_compiled_code_is_kept_by_kind_of_machine_in_a_data_folder_that_can_be_written(
    tmp_path, monkeypatch
):
    def folder_of(machine, data):
        monkeypatch.setenv("KVLAB_DATA", str(data))
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        keep_compiled_code(machine)
        return os.environ.get("TORCHINDUCTOR_CACHE_DIR")

    names = ("AMD EPYC 9R14", "AMD EPYC 9R14 NVIDIA H100 80GB HBM3")
    found = [folder_of(name, tmp_path / "data") for name in names]
    assert found == [str(tmp_path / "data" / "compiled" / name.replace(" ", "-")) for name in names]
    (tmp_path / "file").touch()
    assert folder_of(names[0], tmp_path / "file") is None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    keep_compiled_code(names[0])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere"


@pytest.mark.parametrize(
    ("gpus", "is_disturbed", "timings"),
    [(1.0, False, "exclusive"), (0.5, False, "shared"), (1.0, True, "shared")],
)
def test_timings_are_exclusive_only_if_nothing_else_was_at_work(
    monkeypatch, gpus, is_disturbed, timings
):
    speed = BenchmarkResult({"tpot_ms_p50": 1.0}, [], is_disturbed=is_disturbed)
    monkeypatch.setattr("kvlab.trial.torch_trainable.benchmark", lambda *_, **__: speed)
    made = TorchTrainable.__new__(TorchTrainable)
    made._trial, made._experiment = SimpleNamespace(resources=experiment(gpus=gpus).resources), None
    made._dataset = SimpleNamespace(train=np.zeros(1), validation=None)
    made._device, made._report, made._machine = "cuda", print, Machine("a device", 1)
    assert made._benchmark(None) == (speed, Machine("a device", 1, timings))
