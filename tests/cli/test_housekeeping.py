"""`kvlab status`, `verify` and `init`, as a person calls them."""

import json
import os
import shutil

import pytest

from kvlab.cli.main import main
from kvlab.fs.atomic_files import write_json
from kvlab.fs.sealed_files import read_sealed_json, seal_file, write_sealed_json
from kvlab.spec import load_experiment, load_sweep
from kvlab.store import Store
from kvlab.sweep.driver.driver_registry import join_sweep
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.extensions import find_missing
from tests.support.stub_trials import StubRun, drive, tiny_plan


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


def read_all(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_init_makes_specs_that_plan_and_overwrites_nothing(tmp_path, capsys):
    folder = tmp_path / "mine"
    assert main(["init", str(folder)]) == 0
    assert "kvlab plan sweeps/first.yaml" in capsys.readouterr().out
    load_experiment(folder / "experiments" / "small.yaml")
    assert len(load_sweep(folder / "sweeps" / "first.yaml").cells()) == 5
    if not find_missing("reference"):
        schema = json.loads((folder / "sweeps" / "sweep.schema.json").read_text())
        assert schema["title"] == "kvlab sweep"
    assert (folder / ".gitignore").read_text() == "runs/\n"
    before = read_all(tmp_path)
    (folder / "experiments" / "small.yaml").unlink()
    assert main(["init", str(folder)]) == 2
    assert read_all(tmp_path).keys() < before.keys(), "the file stays away"
