"""Files of the record x ways to damage them: healed, refused in one line, or harmless.

No damage may be silent, a traceback, or a hang. `python -m tests.studies fuzz_record` draws more.
"""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from kvlab.cli.commands import COMMANDS
from kvlab.cli.main import main
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.store import Store
from kvlab.store.verification import heal, verify_record
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.kill_process import run_until
from tests.support.stub_looks import drive_looks, load_looks
from tests.support.stub_search import searching
from tests.support.stub_trials import StubRun, drive, tiny_plan

DAMAGES = ("flip", "cut", "gone", "type", "deep", "other", "pipe", "loop")
SEALED_ALIKE = ("flip", "gone", "loop")
"""A seal tells the ways to be damaged apart no further."""

FILES = {
    "trials/*/trial.json": SEALED_ALIKE,
    "trials/*/result.json": DAMAGES,
    "trials/*/items.jsonl.gz": SEALED_ALIKE,
    "trials/*/attempts/*/log.txt": ("pipe",),
    "trials/*/progress.json": [one for one in DAMAGES if one != "other"],  # not sealed, and one
    "trainings/*/config.json": SEALED_ALIKE,
    "trainings/*/training.json": SEALED_ALIKE,
    "trainings/*/final/model.safetensors": DAMAGES,
    "sweeps/*/sweep.json": SEALED_ALIKE,
    "sweeps/*/reported.json": SEALED_ALIKE,
}
NEEDED = {"items.jsonl.gz", "config.json"}
"""Files without which the record is wrong, and not only smaller."""


def damage_file(path: Path, damage: str, other: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    if damage == "flip":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage == "cut":
        path.write_bytes(data[: len(data) * 2 // 3])
    elif damage == "type":
        path.write_text('{"schema": "two", "trial": 3, "cells": "none", "measurements": []}\n')
    elif damage == "deep":
        path.write_text("[" * 100_000 + "]" * 100_000)
    elif damage == "other":
        shutil.copyfile(other, path)
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage == "loop":
        path.symlink_to(path.name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    store = Store(folder / "runs")
    planned = tiny_plan(folder, store)
    drive(planned, store, StubRun(store.path))
    source = planned.sweep.source
    texts = {"yaml": source.document.text, "experiment_yaml": source.base_document.text}
    store.write_sweep(describe_sweep(planned, **texts, command="kvlab submit s.yaml"))
    store.note_report("s", [0, 1])
    state = {"stage": "training", "step": 1, "steps": 20, "loss": 1.0}
    path = store.trial_directory(store.trial_ids()[0]) / "progress.json"
    path.write_text(json.dumps(state))
    return folder


@pytest.fixture
def store(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "s")
    return Store(tmp_path / "s" / "runs")


def measurements(store):
    return {trial: store.result(trial)["measurements"] for trial in store.trial_ids()}


def submit(store):
    drive(tiny_plan(store.path.parent, store), store, StubRun(store.path))


@pytest.mark.parametrize(("files", "damage"), [(n, one) for n, of in FILES.items() for one in of])
def test_damage_is_found_and_healed(store, files, damage, capsys):
    before, paths = measurements(store), sorted(store.path.glob(files))
    damage_file(paths[0], damage, paths[-1])

    # every reader answers, in a line where it cannot
    readers = [["status"], ["status", "s"], ["logs", store.trial_ids()[0]]]
    for command in (*readers, *([name] for name in COMMANDS if name == "gc")):
        assert main([*command, "--store", str(store.path)]) in (0, 1, 2)
    output = capsys.readouterr()
    assert "Traceback" not in output.out + output.err

    found, name = verify_record(store).damaged, paths[0].name
    is_harmless = name in ("progress.json", "log.txt") or (damage == "gone" and name not in NEEDED)
    assert bool(found) != is_harmless
    for directory in {item.directory for item in found}:
        assert heal(directory)
    assert verify_record(store).damaged == []

    submit(store)
    assert measurements(store) == before
    store.note_report("s", [0, 1])
    assert store.reported_seeds("s") == [[0, 1]]
    if found and damage != "gone":
        assert [path for path in store.path.rglob("damaged/*/**/*") if path.name == name]


def test_a_lock_whose_holder_is_unknown_and_long_gone_keeps_no_damage(store, monkeypatch):
    monkeypatch.setenv("KVLAB_LEASE_SECONDS", "1")
    folder = store.trial_directory(store.trial_ids()[0])
    damage_file(folder / "result.json", "flip", store.path)
    (folder / "lock.99").write_text("torn")
    assert heal(folder) is None, "a process may have begun to write it"
    os.utime(folder / "lock.99", (0, 0))
    assert heal(folder)


@pytest.mark.faults
def test_a_heal_that_dies_before_or_after_any_move_is_completed_by_the_next(store, monkeypatch):
    monkeypatch.setenv("KVLAB_LEASE_SECONDS", "1")
    whole, before = store.path.with_name("whole"), measurements(store)
    folder = store.trial_directory(store.trial_ids()[0])
    for name in ("result.json", "trial.json"):
        damage_file(folder / name, "flip", folder)
    store.path.rename(whole)
    for moment in itertools.count(1):
        shutil.copytree(whole, store.path)
        code = run_until(lambda: heal(folder), moment, ("mkdir", "replace", "link"))
        heal(folder)
        assert verify_record(store).damaged == [], moment
        submit(store)
        assert measurements(store) == before, moment
        shutil.rmtree(store.path)
        if code == 0:
            break
    assert moment > 8, "the lock, two moves"


@pytest.mark.parametrize(
    "name",
    ["result.json", "items.jsonl.gz", "training.json", "config.json", "final/model.safetensors"],
)
def test_a_submit_alone_heals_what_it_needs(store, name):
    """Without `kvlab verify`: what has to be read again is found damaged then."""
    before, trial = measurements(store), store.trial_ids()[0]
    folder = store.trial_directory(trial)
    if not (folder / name).exists():  # a trial that has to be measured again needs the weights
        folder = store.training_directory(store.result(trial)["training"])
        (store.trial_directory(trial) / "result.json").unlink()
    damage_file(folder / name, "flip", store.path)
    submit(store)
    assert measurements(store) == before


def test_nothing_is_collected_without_the_description_of_a_sweep(store):
    files, path = sorted(store.path.glob("tr*/*/*")), store.sweep_directory("s") / "sweep.json"
    damage_file(path, "flip", path)
    assert heal(path.parent)
    assert verify_record(store).damaged == []
    for option in ("--unused", "--weights") if "gc" in COMMANDS else ():
        assert main(["gc", option, "--apply", "--store", str(store.path)]) == 1
    assert [file for file in files if not file.exists()] == []


@pytest.mark.parametrize("kind", ["looks", "search", "forged looks"])
def test_what_was_decided_is_decided_again_from_the_results(tmp_path, kind):
    """Looks, rates that were tuned and the suggestions of a search lie in one file each."""

    def decide():
        if "looks" in kind:
            drive_looks(load_looks(tmp_path), store)
        else:
            _, search, driver = searching(tmp_path)
            driver.run()
            search.finish()

    store = Store(tmp_path / "runs")
    decide()
    path = store.sweep_directory("s") / ("search.json" if kind == "search" else "sweep.json")
    before, results = json.loads(path.read_text()), measurements(store)
    if kind == "forged looks":  # with a valid seal, so that nothing is found
        forged = read_sealed_json(path)
        for state in forged["looks"]["taken"][0]["states"].values():
            state["unknown"] = state.popitem()[1]
        forged["texts"] = {"0" * 64: {"unknown": 1}}
        write_sealed_json(path, forged)
    else:
        damage_file(path, "flip", path)
        with store.driver_lock("s").hold():
            assert heal(path.parent) is None, "a driver may be about to write it"
        (damage,) = heal(path.parent)
        assert str(damage).startswith(f"sweeps/s/{path.name} is damaged: ")
        assert (path.parent / "damaged" / "1" / path.name).exists()
    decide()
    again = json.loads(path.read_text())
    for content in (before, again):
        content.pop("sha256")
        content.get("search", content).pop("seconds", None)  # that the suggestions took
        content.pop("seconds", None)
    assert again == before
    assert measurements(store) == results
