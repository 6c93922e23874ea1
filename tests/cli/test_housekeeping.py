"""`kvlab gc`, `doctor` and `init`, as a person calls them."""

import importlib.util
import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from kvlab.cli.main import main
from kvlab.errors import ResourceError
from kvlab.spec import load_experiment, load_sweep
from kvlab.store import Store
from kvlab.sweep import Driver
from kvlab.sweep.executors.inline import InlineExecutor
from tests.support.stub_trials import SWEEP, StubRun, tiny_plan


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A finished sweep of 8 trials on 4 trainings."""
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "runs")
    planned = tiny_plan(tmp_path)
    Driver(
        planned, store, InlineExecutor(StubRun(store.path)), description=described(planned)
    ).run()
    return store


def described(planned):
    cells = [
        {"levels": dict(c.levels), "trials": {str(s): t for s, t in c.trials.items()}}
        for c in planned.cells
    ]
    return {"name": "s", "question": "q", "factors": {}, "cells": cells}


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def collect(*options):
    return main(["gc", "--store", "runs", "--json", *options])


def test_a_tidy_store_has_nothing_to_remove(store, capsys):  # noqa: ARG001
    assert main(["gc", "--store", "runs"]) == 0
    assert capsys.readouterr().out == "runs holds nothing that could go\n"


def test_a_dry_run_shows_exactly_what_apply_removes(store, capsys):
    training = store.training_directory(tiny_plan(store.path.parent).trials[0].trial.training_id)
    (training / "checkpoints" / "step-1").mkdir(parents=True)
    (training / "checkpoints" / "step-1" / "model.safetensors").write_bytes(b"x" * 1000)
    (training / "final" / ".model.safetensors.abc").write_bytes(b"x" * 10)
    before = everything(store.path)
    assert collect() == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["bytes"] == 1010
    assert [item["why"] for item in shown["items"]] == [
        "checkpoints of a finished training", "half written when something was killed",
    ]  # fmt: skip
    assert everything(store.path) == before
    assert collect("--apply") == 0
    assert json.loads(capsys.readouterr().out)["items"] == shown["items"]
    gone = set(before) - set(everything(store.path))
    assert {path for path in gone if not path.name.startswith("lock.")} == {
        training / "checkpoints" / "step-1" / "model.safetensors",
        training / "final" / ".model.safetensors.abc",
    }
    assert all(one.has_ended for one in tiny_plan(store.path.parent, store).trials)


def test_checkpoints_of_an_unfinished_training_are_kept(store, capsys):
    running = store.path / "trainings" / ("a" * 16)
    (running / "checkpoints" / "step-1").mkdir(parents=True)
    (running / "checkpoints" / "step-1" / "x").write_bytes(b"x")
    assert collect() == 0
    assert json.loads(capsys.readouterr().out)["items"] == []


def test_files_that_a_process_uses_are_kept(store, capsys):
    trial = store.trial_ids()[0]
    (store.trial_directory(trial) / ".result.json.abc").write_text("{")
    with store.trial_lock(trial).hold():
        assert collect("--apply") == 0
    assert json.loads(capsys.readouterr().out)["items"] == []
    assert (store.trial_directory(trial) / ".result.json.abc").exists()


def test_weights_are_kept_until_every_sweep_that_uses_them_has_ended(store, tmp_path, capsys):
    longer = tiny_plan(
        tmp_path,
        store,
        SWEEP.replace('tied: {serving.tie: "adjacent:2"}', "int8: {serving.kv_dtype: int8}"),
    )
    store.write_sweep({**described(longer), "name": "longer"})
    assert collect("--weights") == 0
    assert json.loads(capsys.readouterr().out)["items"] == []
    Driver(longer, store, InlineExecutor(StubRun(store.path))).run()
    assert collect("--weights", "--apply") == 0
    assert len(json.loads(capsys.readouterr().out)["items"]) == 4
    assert all(not store.is_trained(p.trial.training_id) for p in longer.trials)
    assert all(one.has_ended for one in tiny_plan(tmp_path, store).trials)


def test_unused_removes_only_trials_of_no_sweep(store, tmp_path, capsys):
    other = tiny_plan(tmp_path, store, SWEEP.replace("seeds: [0, 1]", "seeds: [7]"))
    Driver(other, store, InlineExecutor(StubRun(store.path))).run()
    assert collect("--unused", "--apply") == 0
    assert len(json.loads(capsys.readouterr().out)["items"]) == 6
    assert all(store.status(one.trial.id) is None for one in other.trials)
    assert all(one.has_ended for one in tiny_plan(tmp_path, store).trials)


def test_init_makes_specs_that_plan(tmp_path, capsys):
    folder = tmp_path / "mine"
    assert main(["init", str(folder)]) == 0
    assert "kvlab plan sweeps/first.yaml" in capsys.readouterr().out
    load_experiment(folder / "experiments" / "small.yaml")
    assert len(load_sweep(folder / "sweeps" / "first.yaml").cells()) == 5
    assert (
        json.loads((folder / "sweeps" / "sweep.schema.json").read_text())["title"] == "kvlab sweep"
    )
    assert (folder / ".gitignore").read_text() == "runs/\n"


def test_init_overwrites_nothing(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert main(["init", str(tmp_path / "README.md")]) == 2


def test_doctor_reports_the_installation_and_leaves_no_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    assert main(["doctor", "--store", str(tmp_path / "runs"), "--json"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert {found[name]["state"] for name in ("torch", "ray", "store", "MLflow")} == {"ok"}
    assert found["text"]["state"] == "note"
    assert "kvlab data prepare" in found["text"]["way_out"]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def _no_ray(monkeypatch):
    def refuse(name, run):  # noqa: ARG001 (those of make_executor)
        raise ResourceError("ray cannot be started: no room")

    monkeypatch.setattr("kvlab.cli.commands.doctor.make_executor", refuse)


@pytest.mark.usefixtures("_no_ray")
def test_doctor_finds_a_store_and_a_ray_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--store", str(tmp_path / "file" / "runs")]) == 1
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert "--store or KVLAB_STORE" in text
    assert "no room" in text
    assert "--executor inline" in text


GPU = {
    "is_available": True, "device_count": 2, "mem_get_info": (70, 80),
    "get_device_properties": SimpleNamespace(name="toy"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "name", "state", "words"),
    [
        ({}, "GPU 1", "ok", "70 B of 80 B"),
        ({"CC": "no-such-compiler"}, "compiler", "wrong", "install gcc"),
        ({"CC": "sh"}, "compiler", "ok", "Triton, with sh"),
        ({"triton": None}, "compiler", "wrong", "pip install triton"),
        ({"is_available": False}, "GPU", "wrong", "for CUDA 12.8 sees no GPU"),
        ({"is_available": False, "built": None}, "GPU", "wrong", "for CPU sees no GPU"),
        ({"is_available": False, "nvidia-smi": None}, "GPU", "note", "none visible"),
    ],
)
@pytest.mark.usefixtures("_no_ray")
def test_doctor_looks_at_what_a_gpu_needs(facts, name, state, words, monkeypatch, capsys):
    facts = {**GPU, "nvidia-smi": "", "CC": "sh", "triton": "", "built": "12.8", **facts}
    which, find_spec = shutil.which, importlib.util.find_spec
    for key in GPU:
        monkeypatch.setattr(torch.cuda, key, lambda *_, k=key: facts[k])
    monkeypatch.setattr(torch.version, "cuda", facts["built"])
    monkeypatch.setattr(
        shutil, "which", lambda n: facts["nvidia-smi"] if n == "nvidia-smi" else which(n)
    )
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: facts["triton"] if n == "triton" else find_spec(n)
    )
    monkeypatch.setenv("CC", facts["CC"])
    assert main(["doctor", "--json"]) == 1, "Ray does not start"
    check = {check["name"]: check for check in json.loads(capsys.readouterr().out)}[name]
    assert check["state"] == state
    assert words in f"{check['found']} {check['way_out']}"
