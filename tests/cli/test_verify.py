"""`kvlab verify`: what is damaged is named; with --heal it is moved aside, and nothing else."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.fs.sealed_files import seal_file, write_sealed_json
from kvlab.store import Store
from tests.support.stub_trials import StubRun, tiny_plan


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "runs")
    StubRun(store.path)(tiny_plan(tmp_path).trials[0].trial)
    return store


def verify(store, *options):
    return main(["verify", "--store", str(store.path), *options])


def test_a_whole_record_is_said_to_be_so(store, capsys):
    assert verify(store) == 0
    assert "1 trial, 1 training, 1 dataset: 6 files read" in capsys.readouterr().out


def test_damage_is_named_then_moved_aside(store, capsys):
    (trial,) = store.trial_ids()
    path = store.trial_directory(trial) / "result.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"seed": 0', b'"seed": 1'))
    assert verify(store) == 1
    out = capsys.readouterr().out
    assert f"trials/{trial}/result.json: its contents do not have the sha256 at its end" in out
    assert "submit the sweep again: the trial is measured again" in out
    assert "kvlab verify --heal" in out
    assert path.exists(), "without --heal nothing changes"

    with store.trial_lock(trial).hold(0.0):
        assert verify(store, "--heal") == 1
        assert "left, because a process uses it now" in capsys.readouterr().out
    assert verify(store, "--heal", "--json") == 0
    (damage,) = json.loads(capsys.readouterr().out)["damaged"]
    assert damage["path"] == f"trials/{trial}/result.json"
    aside = path.parent / "damaged" / "1" / "result.json"
    assert aside.read_bytes() == whole.replace(b'"seed": 0', b'"seed": 1')
    assert store.status(trial) is None
    assert verify(store) == 0


def test_weights_that_were_trained_again_are_noted(store, capsys):
    (trial,) = store.trial_ids()
    training = store.result(trial)["training"]
    store.set_aside_training(training)
    directory = store.training_directory(training)
    (directory / "final").mkdir()
    (directory / "final" / "model.safetensors").write_text("other weights")
    files = {"final/model.safetensors": seal_file(directory / "final" / "model.safetensors")}
    write_sealed_json(directory / "training.json", {"files": files})
    assert verify(store) == 0
    assert "was measured on weights that have been trained again" in capsys.readouterr().out


def test_a_training_whose_record_is_gone_is_noted(store, capsys):
    (trial,) = store.trial_ids()
    training = store.result(trial)["training"]
    (store.training_directory(training) / "training.json").unlink()
    assert verify(store) == 0
    assert f"weights whose record is gone (training {training})" in capsys.readouterr().out
