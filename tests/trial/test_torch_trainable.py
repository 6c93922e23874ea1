"""Training and measurement with torch: the device, memory share and threads that are set up, and
what a result says about its timings; the timing lock of a shared device. CUDA is faked where there is
none."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from kvlab.benchmark.benchmark_stage import BenchmarkResult
from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.errors import ResourceError
from kvlab.layout.gpu_sharing import CONTEXT_BYTES
from kvlab.spec import Experiment
from kvlab.store.provenance import Origin, build_provenance, describe_device
from kvlab.store.result import describe_kv
from kvlab.trial import Trial
from kvlab.trial.gpu_timing_lock import TimingLock
from kvlab.trial.torch_trainable import TorchTrainable, keep_compiled_code, set_up_device
from tests.support.text_files import stories, write_jsonl

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


class Impatient(TimingLock):
    def exclusive(self, on_wait=lambda: None, timeout=0.2):
        return super().exclusive(on_wait, timeout)


@pytest.fixture
def trainable(tmp_path, monkeypatch):
    """Training and measurement on CPU, with the turns of one that shares a device."""
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    path = write_jsonl(tmp_path / "texts.jsonl", stories(8))
    from_files = {"source": "files", "paths": (str(path),), "validation_fraction": 0.4}
    of = experiment()
    of = of.model_copy(update={"data": of.data.model_copy(update=from_files)})
    made = TorchTrainable(Trial.of(of, prepare_dataset(of.data).digest, 0), lambda _: None)
    made._timing_lock = Impatient("GPU-1", tmp_path)
    made._timing_lock.share()
    yield made
    made._timing_lock.close()


@pytest.mark.parametrize("beside", ["nobody", "another trial", "other processes"])
def test_timings_are_exclusive_only_if_nothing_else_was_at_work(
    trainable, tmp_path, monkeypatch, beside
):
    speed = BenchmarkResult({"tpot_ms_p50": 1.0}, [], is_disturbed=beside == "other processes")
    monkeypatch.setattr("kvlab.trial.torch_trainable.benchmark", lambda *_, **__: speed)
    other = TimingLock("GPU-1", tmp_path)
    if beside == "another trial":
        other.share()  # in the midst of a long step
    measured, machine = trainable._benchmark(None)
    other.close()
    assert measured is speed
    assert machine.timings == ("exclusive" if beside == "nobody" else "shared")


@pytest.fixture
def locks(tmp_path):
    """Two that share a device. A lock belongs to what opened its file, not to a process."""
    made = [TimingLock("GPU-1", tmp_path) for _ in range(2)]
    for lock in made:
        lock.share()
    yield made
    for lock in made:
        lock.close()


@pytest.mark.parametrize("give_way", [TimingLock.yield_to_timing, TimingLock.share])
def test_one_times_alone_while_the_other_waits_at_its_next_step(locks, give_way):
    """Or where it comes back from an error."""
    works, times = locks
    assert not works.yield_to_timing(), "nobody wants to time"
    waits, is_alone, steps_wait, is_over = (Event() for _ in range(4))

    def measure():
        with times.exclusive(waits.set, 60.0) as is_held:
            assert is_held
            is_alone.set()
            assert is_over.wait(60)

    with ThreadPoolExecutor(2) as threads:
        timing = threads.submit(measure)
        assert waits.wait(60)
        assert not is_alone.is_set(), "the other is within a step"
        step = threads.submit(give_way, works, steps_wait.set)
        assert is_alone.wait(60)
        assert steps_wait.wait(60)
        assert not step.done()
        is_over.set()
        timing.result(60)
        assert step.result(60) in (True, None)
    assert not works.yield_to_timing()


def test_patience_ends_and_says_so(tmp_path, locks):
    waits = []
    with locks[0].exclusive(lambda: waits.append(1), timeout=0.1) as is_alone:
        assert not is_alone
    assert waits
    assert not locks[1].yield_to_timing(), "nothing is held after it"
    with TimingLock("GPU-2", tmp_path).exclusive() as is_alone:
        assert is_alone, "another device is another matter"
