"""`kvlab status`, `verify`, `gc`, `doctor` and `init`, as a person calls them."""

import importlib.util
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from kvlab.cli.main import main
from kvlab.errors import ResourceError
from kvlab.fs.atomic_files import write_json
from kvlab.fs.sealed_files import read_sealed_json, seal_file, write_sealed_json
from kvlab.spec import load_experiment, load_sweep
from kvlab.store import Store
from kvlab.sweep.driver.driver_registry import join_sweep
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.stub_trials import SWEEP, StubRun, drive, tiny_plan


def test_status_shows_counts_rate_time_left_failures_and_drivers(tmp_path, capsys):
    store, planned = Store(tmp_path / "runs"), tiny_plan(tmp_path)
    bad, again = planned.trials[1].trial.id, planned.trials[2].trial.id
    description = describe_sweep(planned, yaml="", experiment_yaml="", command="kvlab submit")
    run = StubRun(store.path, script={(bad, "measure", 0): "bug"})
    drive(planned, store, run, description=description)
    (store.trial_directory(again) / "result.json").unlink()  # as if it ran now
    state = {"stage": "training", "step": 5, "steps": 20, "tokens_per_second": 1234.0}
    write_json(store.trial_directory(again) / "progress.json", {**state, "seconds_left": 9.0})
    command = ["status", "s", "--store", str(store.path)]
    with store.trial_lock(again).hold():
        assert main(command) == main([*command, "--json"]) == 0
    text, brace, facts = capsys.readouterr().out.partition("\n{\n")
    lines, facts = text.splitlines(), json.loads(brace + facts)
    assert lines[0] == "s: 8 trials: 6 done, 1 failed, 1 running; no driver is running"
    assert lines[1].startswith("rate: ")
    assert "trials an hour, 1,234 tokens/s in training, about " in lines[1]
    failed = next(line for line in lines if line.startswith("failed"))
    assert "bug: ValueError: no way to measure" in failed
    assert f"(kvlab logs {bad[:8]})" in failed
    assert facts["pace"]["tokens_per_second"] == 1234
    assert 0 < facts["pace"]["seconds_left"] <= 9
    assert facts["drivers"] == []
    path = store.trial_directory(bad) / "result.json"
    result = read_sealed_json(path)
    forged = {**result["error"], "type": "Value\ndone    forged"}
    write_sealed_json(path, {**result, "error": forged})
    assert main(command) == 0
    assert "\ndone    forged" not in capsys.readouterr().out, "no line of its own"
    with (
        join_sweep(store, "s", description, exclusive=False),
        join_sweep(store, "s", None, exclusive=False),
    ):
        assert main(command) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.count(f"by process {os.getpid()} since ") == 2


@pytest.fixture
def verify(tmp_path, capsys):
    """Verify a store with one trial; give the exit code and the output."""
    store = Store(tmp_path / "runs")
    StubRun(store.path)(tiny_plan(tmp_path).trials[0].trial)

    def run(*options):
        return main(["verify", "--store", str(store.path), *options]), capsys.readouterr().out

    run.store, run.trial = store, store.trial_ids()[0]
    run.training = store.result(run.trial)["training"]
    return run


def test_damage_is_named_then_moved_aside(verify):
    code, out = verify()
    assert (code, "1 trial, 1 training, 1 dataset: 6 files read" in out) == (0, True)
    store, trial = verify.store, verify.trial
    path = store.trial_directory(trial) / "result.json"
    damaged = path.read_bytes().replace(b'"seed": 0', b'"seed": 1')
    path.write_bytes(damaged)
    code, out = verify()
    assert code == 1
    assert f"trials/{trial}/result.json: its contents do not have the sha256 at its end" in out
    assert "submit the sweep again: the trial is measured again" in out
    assert "kvlab verify --heal" in out
    assert path.exists(), "without --heal nothing changes"
    with store.trial_lock(trial).hold(0.0):
        code, out = verify("--heal")
    assert (code, "left, because a process uses it now" in out) == (1, True)
    code, out = verify("--heal", "--json")
    (damage,) = json.loads(out)["damaged"]
    assert (code, damage["path"]) == (0, f"trials/{trial}/result.json")
    assert (path.parent / "damaged" / "1" / "result.json").read_bytes() == damaged
    assert store.status(trial) is None
    assert verify()[0] == 0


def test_weights_that_were_trained_again_or_whose_record_is_gone_are_noted(verify):
    directory = verify.store.training_directory(verify.training)
    shutil.rmtree(directory)
    (directory / "final").mkdir(parents=True)
    (directory / "final" / "model.safetensors").write_text("other weights")
    files = {"final/model.safetensors": seal_file(directory / "final" / "model.safetensors")}
    write_sealed_json(directory / "training.json", {"files": files})
    code, out = verify()
    assert code == 0
    assert "was measured on weights that have been trained again" in out
    (directory / "training.json").unlink()
    code, out = verify()
    assert (code, f"record is gone (training {verify.training})" in out) == (0, True)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A finished sweep of 8 trials on 4 trainings."""
    monkeypatch.chdir(tmp_path)
    store, planned = Store(tmp_path / "runs"), tiny_plan(tmp_path)
    drive(planned, store, StubRun(store.path), description=describe(planned))
    return store


def describe(planned):
    cells = [
        {"levels": dict(c.levels), "trials": {str(s): t for s, t in c.trials.items()}}
        for c in planned.cells
    ]
    return {"name": "s", "question": "q", "factors": {}, "cells": cells}


@pytest.fixture
def collect(capsys):
    def run(*options):
        assert main(["gc", "--store", "runs", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def read_all(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_dry_run_shows_exactly_what_apply_removes(store, collect, capsys):
    assert main(["gc", "--store", "runs"]) == 0
    assert capsys.readouterr().out == "runs holds nothing that could go\n"
    training = store.training_directory(tiny_plan(store.path.parent).trials[0].trial.training_id)
    waste = [
        training / "checkpoints" / "step-1" / "model.safetensors",
        training / "final" / ".model.safetensors.abc",
    ]
    unfinished = store.path / "trainings" / ("a" * 16) / "checkpoints" / "step-1" / "x"
    for path, size in zip([*waste, unfinished], (1000, 10, 1), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    before, shown = read_all(store.path), collect()
    assert shown["bytes"] == 1010
    assert [item["why"] for item in shown["items"]] == [
        "checkpoints of a finished training", "half written when something was killed",
    ]  # fmt: skip
    assert read_all(store.path) == before
    assert collect("--apply")["items"] == shown["items"]
    gone = set(before) - set(read_all(store.path))
    assert {path for path in gone if not path.name.startswith("lock.")} == set(waste)
    assert all(one.has_ended for one in tiny_plan(store.path.parent, store).trials)


def test_files_that_a_process_uses_are_kept(store, collect):
    trial = store.trial_ids()[0]
    path = store.trial_directory(trial) / ".result.json.abc"
    path.write_text("{")
    with store.trial_lock(trial).hold():
        assert collect("--apply")["items"] == []
    assert path.exists()


def test_weights_are_kept_until_every_sweep_that_uses_them_has_ended(store, tmp_path, collect):
    tied, int8 = 'tied: {serving.tie: "adjacent:2"}', "int8: {serving.kv_dtype: int8}"
    longer = tiny_plan(tmp_path, store, SWEEP.replace(tied, int8))
    store.write_sweep({**describe(longer), "name": "longer"})
    assert collect("--weights")["items"] == []
    drive(longer, store, StubRun(store.path))
    assert len(collect("--weights", "--apply")["items"]) == 4
    assert all(not store.is_trained(p.trial.training_id) for p in longer.trials)
    assert all(one.has_ended for one in tiny_plan(tmp_path, store).trials)


def test_unused_removes_only_trials_of_no_sweep(store, tmp_path, collect):
    other = tiny_plan(tmp_path, store, SWEEP.replace("seeds: [0, 1]", "seeds: [7]"))
    drive(other, store, StubRun(store.path))
    assert len(collect("--unused", "--apply")["items"]) == 6
    assert all(store.status(one.trial.id) is None for one in other.trials)
    assert all(one.has_ended for one in tiny_plan(tmp_path, store).trials)


def test_init_makes_specs_that_plan_and_overwrites_nothing(tmp_path, capsys):
    folder = tmp_path / "mine"
    assert main(["init", str(folder)]) == 0
    assert "kvlab plan sweeps/first.yaml" in capsys.readouterr().out
    load_experiment(folder / "experiments" / "small.yaml")
    assert len(load_sweep(folder / "sweeps" / "first.yaml").cells()) == 5
    schema = json.loads((folder / "sweeps" / "sweep.schema.json").read_text())
    assert schema["title"] == "kvlab sweep"
    assert (folder / ".gitignore").read_text() == "runs/\n"
    before = read_all(tmp_path)
    (folder / "experiments" / "small.yaml").unlink()
    assert main(["init", str(folder)]) == 2
    assert read_all(tmp_path).keys() < before.keys(), "the file stays away"


def test_doctor_reports_the_installation_and_leaves_no_files(tmp_path, monkeypatch, capsys):
    """Of Ray it starts a cluster and ends it, which tests/sweep/executors/test_ray.py does."""
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    asked, ended = [], SimpleNamespace(close=lambda: asked.append("end"))
    start = lambda name, run: asked.append((name, run(None))) or ended  # noqa: E731
    monkeypatch.setattr("kvlab.cli.commands.doctor.make_executor", start)
    assert main(["doctor", "--store", str(tmp_path / "runs"), "--json"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert {found[name]["state"] for name in ("torch", "ray", "store", "MLflow")} == {"ok"}
    assert found["text"]["state"] == "note"
    assert "kvlab data prepare" in found["text"]["way_out"]
    assert list(tmp_path.iterdir()) == []
    assert asked == [("ray", "done"), "end"]


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
    for words in ("WRONG", "--store or KVLAB_STORE", "no room", "--executor inline"):
        assert words in text


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
    for key in GPU:
        monkeypatch.setattr(torch.cuda, key, lambda *_, k=key: facts[k])
    monkeypatch.setattr(torch.version, "cuda", facts["built"])
    for module, name_of, known in (
        (shutil, "which", "nvidia-smi"),
        (importlib.util, "find_spec", "triton"),
    ):
        real = getattr(module, name_of)
        monkeypatch.setattr(
            module, name_of, lambda n, k=known, r=real: facts[k] if n == k else r(n)
        )
    monkeypatch.setenv("CC", facts["CC"])
    assert main(["doctor", "--json"]) == 1, "Ray does not start"
    check = {check["name"]: check for check in json.loads(capsys.readouterr().out)}[name]
    assert check["state"] == state
    assert words in f"{check['found']} {check['way_out']}"
