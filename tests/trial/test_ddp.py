"""A trial whose training runs in two workers under Ray Train, on a real local cluster."""

import contextlib
import json
import random
import re
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch

from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.errors import Diverged, ResourceError, WorkerKilled
from kvlab.spec import Experiment
from kvlab.store import Store
from kvlab.store.result import classify_error
from kvlab.sweep.executors import make_executor
from kvlab.trial.ddp import (
    _make_trainer,
    _WorkerTask,
    read_worker_error,
    train_ddp,
    write_worker_error,
)
from kvlab.trial.run import run_task
from kvlab.trial.trial import Trial


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rhymes.jsonl"
    rng, words = random.Random(1), ["cat", "sat", "mat", "hat", "flat", "at", "the", "on"]
    lines = [" ".join(rng.choices(words, k=30)) for _ in range(400)]
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return path


@pytest.fixture
def trial(text, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))

    def of(workers, **training):
        experiment = Experiment(
            name="two",
            model={"vocab_size": 257, "block_size": 32, "n_layer": 1, "n_head": 2, "n_embd": 16},
            data={"source": "files", "paths": [str(text)], "tokenizer": "bytes",
                  "validation_fraction": 0.5},
            training={"tokens": 128 * 50, "batch_tokens": 128, "learning_rate": 1e-2,
                      "evaluate_every": 25, "evaluate_tokens": 256, **training},
            evaluation={"loss_tokens": 256, "served": False},
            benchmark={"prompt_tokens": 4, "new_tokens": 4, "repeats": 1},
            resources={"cpus": 1, "workers": workers, "microbatch_tokens": 32},
        )  # fmt: skip
        return Trial.of(experiment, prepare_dataset(experiment.data).digest, seed=3)

    return of


def training_workers():
    processes = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RayTrainWorker" in " ".join(process.cmdline()):
                processes.append(process)
    return processes


def trial_processes():
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if re.match("ray::kvlab.tri", process.name())  # as far as the system keeps it
    ]


def end_of(executor):
    while not (ended := executor.wait(1.0)):
        pass
    return ended[0]


@pytest.mark.faults
@pytest.mark.timeout(900)  # two workers start twice, each with its own imports
def test_one_of_two_workers_killed_the_trial_goes_on_and_loses_as_with_one(trial, tmp_path):
    one = trial(2, tokens=128 * 400, checkpoint_every=20)
    store = Store(tmp_path / "two")
    checkpoints = store.training_directory(one.training_id) / "checkpoints"
    executor = make_executor("ray", partial(run_task, store=str(tmp_path / "two")))
    try:
        executor.start(one)
        while not any(checkpoints.glob("step-*")):  # the test's time limit ends it
            assert executor.wait(0.02) == []
        victim = training_workers()[-1]
        victim.kill()  # SIGKILL
        ended = end_of(executor)
        assert ended.outcome is None
        assert isinstance(ended.error, WorkerKilled), ended.error
        assert store.result(one.id) is None, "no failure of the trial's own"
        psutil.wait_procs(training_workers(), timeout=30)
        assert not training_workers(), "the other worker is gone too"
        executor.start(one)
        ended = end_of(executor)
        assert (ended.outcome, ended.error) == ("trained", None)
        own = replace(one, is_measurement=True)
        executor.start(own)
        while not (measuring := trial_processes()):
            assert executor.wait(0.02) == []
        assert not training_workers(), "the others are free"
        measuring[0].kill()
        assert isinstance(end_of(executor).error, WorkerKilled)
        executor.start(own)
        ended = end_of(executor)
        assert (ended.outcome, ended.error) == ("done", None)
    finally:
        executor.close()
    alone = trial(1, tokens=128 * 400)
    assert alone.id == one.id, "workers are where a trial runs, not what it computes"
    assert run_task(alone, tmp_path / "one") == "done"
    assert not (store.training_directory(one.training_id) / "together").exists()
    resumed, whole = store.result(one.id), Store(tmp_path / "one").result(one.id)
    assert resumed["training_record"]["workers"] == 2
    assert resumed["experiment"]["resources"]["workers"] == 2
    assert resumed["measurements"]["loss"] == pytest.approx(whole["measurements"]["loss"], abs=1e-3)
    assert len(resumed["training_record"]["resumed_from"]) == 1
    assert resumed["training_record"]["resumed_from"][0] >= 20
    pairs = zip(resumed["curves"]["train_loss"], whole["curves"]["train_loss"], strict=True)
    for a, b in pairs:
        # two workers sum in another order than one: 1e-4 apart after 280 steps, and growing
        assert a == pytest.approx(b, abs=1e-4 if a[0] <= 200 else 1e-3)


def test_a_worker_that_fails_by_itself_is_told_apart_from_one_that_dies(tmp_path):
    gone = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]")
    assert read_worker_error(tmp_path) is None, "no worker began: the trainer itself failed"
    (tmp_path / "0-began").touch()
    write_worker_error(tmp_path, 0, gone)
    assert isinstance(read_worker_error(tmp_path), WorkerKilled)
    write_worker_error(tmp_path, 1, ValueError("a mistake"))
    assert read_worker_error(tmp_path) is None
    write_worker_error(tmp_path, 2, Diverged("loss = nan"))
    found = read_worker_error(tmp_path)
    assert (type(found), str(found)) == (Diverged, "loss = nan")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("CUDA error: out of memory"), "device_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "host_memory"),
        (MemoryError(), "host_memory"),
        (torch.OutOfMemoryError("Tried to allocate 2 GiB"), "device_memory"),
    ],
)
def test_a_worker_that_lacks_memory_fails_as_a_trial_alone_does(tmp_path, error, kind):
    (tmp_path / "1-began").touch()
    write_worker_error(tmp_path, 1, error)
    found = read_worker_error(tmp_path)
    assert (classify_error(found), str(found)) == (kind, str(error))


@pytest.mark.faults
def test_workers_see_the_trials_devices_and_what_it_has_compiled(trial, tmp_path, monkeypatch):
    own = {"CUDA_VISIBLE_DEVICES": "3,5", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    task = _WorkerTask(trial(2), tmp_path, tmp_path, 1, print, bool, None)
    environment = _make_trainer(task).run_config.worker_runtime_env["env_vars"]
    assert environment == {**own, "OMP_NUM_THREADS": "1"}


def test_without_ray_it_is_refused(trial, tmp_path):
    with pytest.raises(ResourceError, match=r"2 workers train together under Ray.*--executor ray"):
        train_ddp(trial(2), tmp_path, lambda _: None, lambda: False, fence=None)
