"""The predicted peak of a training against a memory profile of a real step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kvlab.layout import training_peak_bytes
from kvlab.layout.training_memory import microbatch_rows
from kvlab.model import GPT
from kvlab.spec import Experiment
from kvlab.train.loop import train
from kvlab.train.mfu import find_peak_flops
from kvlab.train.train_step import device_microbatch_rows


def make_experiment(model=None, precision="float32", training=None, **resources):
    shape = {"vocab_size": 2304, "block_size": 128, "n_layer": 4, "n_head": 4, "n_embd": 64}
    return Experiment.model_validate({
        "name": "x", "model": {**shape, **(model or {})}, "data": {"tokenizer": "gpt2:2048"},
        "training": {"tokens": 4096, "batch_tokens": 2048, "evaluate_tokens": 128,
                     "precision": precision, **(training or {})},
        "benchmark": {"prompt_tokens": 4, "new_tokens": 4}, "resources": resources,
    })  # fmt: skip


class Tokens:
    train = np.random.default_rng(0).integers(0, 2000, 20_000).astype(np.uint16)
    validation = train[:2000]


@pytest.mark.parametrize(
    ("model", "precision", "micro"),
    [
        ({}, "float32", 256),
        ({"mlp": "swiglu", "n_embd": 128}, "float32", 2048),
        ({"block_size": 256}, "bfloat16", None),
        ({"block_size": 512, "position": "rope", "attention_pattern": "GLLL", "window": 64},
         "float32", None),
        ({"block_size": 1024}, "float32", None),
    ],
)  # fmt: skip
def test_peak_is_near_a_profile(tmp_path, model, precision, micro):
    check_peak(tmp_path, model, precision, micro)


def check_peak(tmp_path, model, precision, micro, training=None):
    resources = {"microbatch_tokens": micro} if micro else {}
    config = make_experiment(model, precision, training, **resources)
    gpt = GPT(config.model, seed=0)
    find_peak_flops(torch.device("cpu"), precision)  # once in a process, by large matrices
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train(gpt, Tokens(), config, seed=0, directory=tmp_path, device="cpu")
    allocated = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    peak += 4 * sum(weight.numel() for weight in gpt.parameters())  # made before the profile
    assert 0.9 < training_peak_bytes(config) / peak < 1.3


def test_the_peak_of_a_record_is_the_predicted_quantity(tmp_path):
    config = make_experiment({"n_embd": 192})
    for attempt in ("loads libraries", "counts"):
        gpt = GPT(config.model, seed=0)
        states = []
        record = train(
            gpt, Tokens(), config, seed=0, directory=tmp_path / attempt, on_progress=states.append
        )
    predicted = training_peak_bytes(config)
    assert 0.7 * predicted - 24e6 < record.peak_bytes < 1.3 * predicted + 24e6
    # the record is made after the last state, when the process may hold a few pages more
    assert 0 <= record.peak_bytes - states[-1]["peak_bytes"] < 1e6
    assert states[-1]["process_bytes"] > record.peak_bytes


def test_a_gpu_without_known_memory_is_taken_at_one_row():
    config = make_experiment(gpus=1.0)
    assert training_peak_bytes(config) < training_peak_bytes(config, memory=80 * 10**9)
    assert microbatch_rows(config, memory=1) == 1
    assert microbatch_rows(config, memory=80 * 10**9) == 16


@pytest.mark.parametrize(("gpus", "part"), [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (0.5, 0.5)])
def test_rows_of_a_pass_fill_the_part_of_the_device_that_is_the_trainings(monkeypatch, gpus, part):
    facts = SimpleNamespace(total_memory=10**8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    config = make_experiment(gpus=gpus)
    rows = device_microbatch_rows(config, torch.device("cuda"))
    alone, memory = make_experiment(gpus=gpus if part == 1.0 else 1.0), int(10**8 * part)
    assert rows == microbatch_rows(alone, memory) > 1
    assert training_peak_bytes(config, 10**8) == training_peak_bytes(alone, memory)


def test_a_model_that_takes_no_step_is_its_weights():
    config = make_experiment()
    still = config.training.model_copy(update={"tokens": 0})
    untrained = config.model_copy(update={"training": still})
    assert not still.steps
    assert training_peak_bytes(untrained) == 4 * sum(
        weight.numel() for weight in GPT(config.model, seed=0).parameters()
    )
