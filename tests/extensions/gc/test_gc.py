"""`kvlab gc`: it shows what it removes, and keeps what somebody needs."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.store import Store
from tests.support.stub_trials import SWEEP, StubRun, drive, tiny_plan


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


def test_what_other_code_made_and_partial_evaluations_of_ended_trials_could_go(store, collect):
    first, second = store.trial_ids()[:2]
    training = store.training_directory(store.read_training_id(first))
    waste = {
        training / "other-code" / "1" / "final" / "model.safetensors": 100,
        store.sweep_directory("s") / "other-code" / "1" / "search.json": 10,
        store.trial_directory(first) / "partial" / "1.json": 1,
    }
    kept = store.trial_directory(second) / "partial" / "1.json"
    for path, size in {**waste, kept: 1000}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (store.trial_directory(second) / "result.json").unlink()  # it goes on from there
    shown = collect()
    assert (shown["bytes"], len(shown["items"])) == (111, 3)
    with store.trial_lock(first).hold():
        assert collect("--apply")["bytes"] == 110
    assert collect("--apply")["bytes"] == 1
    assert kept.exists()
    assert not any(path.exists() for path in waste)


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
