"""`kvlab verify`: what is damaged is named; with --heal it is moved aside, and nothing else."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.fs.sealed_files import seal_file, write_sealed_json
from kvlab.store import Store
from tests.support.stub_trials import StubRun, tiny_plan


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
    store, directory = verify.store, verify.store.training_directory(verify.training)
    store.set_aside_training(verify.training)
    (directory / "final").mkdir()
    (directory / "final" / "model.safetensors").write_text("other weights")
    files = {"final/model.safetensors": seal_file(directory / "final" / "model.safetensors")}
    write_sealed_json(directory / "training.json", {"files": files})
    code, out = verify()
    assert code == 0
    assert "was measured on weights that have been trained again" in out
    (directory / "training.json").unlink()
    code, out = verify()
    assert (code, f"record is gone (training {verify.training})" in out) == (0, True)
