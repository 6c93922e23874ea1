"""Drivers of token budgets die at any write: weights and curves are those of a calm sweep."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from kvlab.fs.atomic_files import file_sha256
from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep import plan
from kvlab.trial.run import run_trial
from tests.support.stub_trials import drive
from tests.support.tiny_sweep import EXPERIMENT, tiny_sweep_folder

RECIPE = "schedule: wsd, warmup_tokens: 64, decay_tokens: 192, "
TRAINING = EXPERIMENT.replace("training: {", f"training: {{checkpoint_every: 3, {RECIPE}")
LEVELS = "".join(f"    t{n}: {{training.tokens: {n}}}\n" for n in (640, 1280, 960))
SWEEP = f"question: q\nexperiment: e.yaml\nfactors:\n  budget:\n{LEVELS}"


def drive_budgets(fatal_sync=None):
    torch.set_num_threads(1)
    if fatal_sync is not None:
        die_before_sync(fatal_sync)
    store = Store("runs")
    drive(plan(load_sweep("s.yaml"), store), store, lambda trial: run_trial(trial, store.path))


def die_before_sync(number):
    """Kill this process with SIGKILL before it makes something durable for that time."""
    sync, left = os.fsync, number

    def die_or_sync(handle):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(handle)

    os.fsync = die_or_sync


def run_in_process(fatal_sync=None):
    process = multiprocessing.get_context("fork").Process(target=drive_budgets, args=(fatal_sync,))
    process.start()
    process.join()
    return process.exitcode


def read_trainings():
    """Return the weights and curves of every training by its id."""
    found = {}
    for path in Path("runs/trainings").glob("*/training.json"):
        record = json.loads(path.read_text())
        curves = record["train_curve"], record["validation_curve"]
        found[path.parent.name] = (file_sha256(path.parent / "final/model.safetensors"), curves)
    return found


@pytest.mark.faults
def test_budgets_whose_driver_dies_at_every_write_end_as_in_a_calm_sweep(tmp_path):
    (tmp_path / "calm").mkdir()
    with tiny_sweep_folder(tmp_path / "calm", SWEEP, TRAINING):
        assert run_in_process() == 0
        calm = read_trainings()
    assert len(calm) == 3
    (tmp_path / "killed").mkdir()
    with tiny_sweep_folder(tmp_path / "killed", SWEEP, TRAINING):
        deaths = 0
        while (ended := run_in_process(fatal_sync=9 + 4 * (deaths % 5))) == -signal.SIGKILL:
            deaths += 1
            assert deaths < 40, "it gets further every time"
        assert ended == 0
        assert deaths > 4
        assert read_trainings() == calm
        (trunk,) = Path("runs/trunks").iterdir()
        assert Store("runs").trunk_steps(trunk.name) == [7, 12]
