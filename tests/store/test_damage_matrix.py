"""Files of the record x ways to damage them: healed, refused in one line, or harmless.

No damage may be silent, a traceback, or a hang.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from kvlab.cli.main import main
from kvlab.store import Store
from kvlab.store.verification import heal_damage, heal_description, verify_record
from kvlab.sweep.planning import description_repair
from kvlab.sweep.planning.description_repair import rebuild_description
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.stub_looks import drive_looks, load_looks
from tests.support.stub_search import searching
from tests.support.stub_trials import StubRun, drive, identify, tiny_plan

DAMAGES = ("flip", "cut", "gone", "type", "deep", "other", "pipe")
FILES = {
    "trial.json": "trials/*/trial.json",
    "result.json": "trials/*/result.json",
    "items.jsonl.gz": "trials/*/items.jsonl.gz",
    "config.json": "trainings/*/config.json",
    "training.json": "trainings/*/training.json",
    "model.safetensors": "trainings/*/final/model.safetensors",
    "sweep.json": "sweeps/*/sweep.json",
    "progress.json": "trials/*/progress.json",
}
BY_NAME = dict.fromkeys(FILES, ("flip", "gone", "pipe"))
BY_NAME |= dict.fromkeys(("result.json", "model.safetensors"), DAMAGES)
BY_NAME["progress.json"] = tuple(one for one in DAMAGES if one != "other")  # there is no other
"""A seal tells the ways to be damaged apart no further; these three are sealed in their own file,
in that of another, and not at all."""

MAY_BE_GONE = {"sweep.json", "trial.json", "result.json", "training.json", "model.safetensors"}
"""Files without which the record is smaller, but not wrong."""


def damage_file(path: Path, damage: str, other: Path) -> None:
    data = path.read_bytes()
    if damage == "flip":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage == "cut":
        path.write_bytes(data[: len(data) * 2 // 3])
    elif damage == "gone":
        path.unlink()
    elif damage == "type":
        path.write_text('{"schema": "two", "trial": 3, "cells": "none", "measurements": []}\n')
    elif damage == "deep":
        path.write_text("[" * 100_000 + "]" * 100_000)
    elif damage == "other":
        shutil.copyfile(other, path)
    else:
        path.unlink()
        os.mkfifo(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    store = Store(folder / "runs")
    planned = tiny_plan(folder, store)
    drive(planned, store, StubRun(store.path))
    store.write_sweep(describe_sweep(planned, yaml="y", experiment_yaml="e", command="c"))
    first = store.trial_ids()[0]
    state = {"stage": "training", "step": 1, "steps": 20, "loss": 1.0}
    (store.trial_directory(first) / "progress.json").write_text(json.dumps(state))
    return folder


@pytest.fixture
def store(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "s")
    return Store(tmp_path / "s" / "runs")


def measurements(store):
    return {trial: store.result(trial)["measurements"] for trial in store.trial_ids()}


@pytest.mark.parametrize(
    ("name", "damage"), [(name, damage) for name in FILES for damage in BY_NAME[name]]
)
def test_damage_is_found_and_healed(tmp_path, store, name, damage, capsys):
    before, paths = measurements(store), sorted(store.path.glob(FILES[name]))
    damage_file(paths[0], damage, paths[-1])

    # every reader answers, in a line where it cannot
    for command in (["status"], ["status", "s"], ["gc"]):
        assert main([*command, "--store", str(store.path)]) in (0, 1, 2)
    output = capsys.readouterr()
    assert "Traceback" not in output.out + output.err

    found = verify_record(store).damaged
    is_harmless = name == "progress.json" or (damage == "gone" and name in MAY_BE_GONE)
    assert bool(found) != is_harmless, (name, damage)
    for item in found:
        assert heal_damage(item) is not None
    assert verify_record(store).damaged == []

    drive(tiny_plan(tmp_path / "s", store), store, StubRun(store.path))
    assert measurements(store) == before
    if found and name != "trial.json":
        aside = [path for path in store.path.rglob("damaged/*/**/*") if path.name == paths[0].name]
        assert aside or damage == "gone"


@pytest.mark.parametrize("name", ["result.json", "items.jsonl.gz", "training.json"])
def test_a_submit_alone_heals_what_it_needs(tmp_path, store, name):
    """Without `kvlab verify`: what has to be read again is found damaged then."""
    before = measurements(store)
    trial = store.trial_ids()[0]
    training = store.result(trial)["training"]
    folder = store.training_directory(training) if "training" in name else None
    damage_file((folder or store.trial_directory(trial)) / name, "flip", store.path)
    if folder is not None:  # a trial that has to be measured again needs the weights
        (store.trial_directory(trial) / "result.json").unlink()
    drive(tiny_plan(tmp_path / "s", store), store, StubRun(store.path))
    assert measurements(store) == before


def describe_whole(tmp_path, store):
    """Write a description that has the real YAML; return its path."""
    planned = tiny_plan(tmp_path / "s", store)
    source = planned.sweep.source
    texts = {"yaml": source.document.text, "experiment_yaml": source.base_document.text}
    store.write_sweep(describe_sweep(planned, **texts, command="kvlab submit s.yaml"))
    return store.sweep_directory(planned.sweep.name) / "sweep.json"


@pytest.mark.parametrize("where", ['"question": "', '"levels": {', '"alpha": ', '"command": "'])
def test_a_description_is_written_again_from_the_yaml_in_it(tmp_path, store, where, monkeypatch):
    monkeypatch.setattr(description_repair, "find_text", identify)
    path = describe_whole(tmp_path, store)
    before, data = store.sweep(path.parent.name), path.read_bytes()
    place = data.index(where.encode()) + len(where)
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    (found,) = verify_record(store).damaged
    assert heal_damage(found, rebuild_description) is not None
    again = store.sweep(path.parent.name)
    if where == '"command": "':  # nothing but the file said it
        again["command"] = before["command"]
    assert again == before
    assert verify_record(store).damaged == []


@pytest.mark.parametrize("where", ['"yaml": "', '"experiment_yaml": "'])
def test_nothing_is_collected_while_a_sweep_has_no_description(tmp_path, store, where, monkeypatch):
    monkeypatch.setattr(description_repair, "find_text", identify)
    path = describe_whole(tmp_path, store)
    data, files = path.read_bytes(), sorted(store.path.glob("tr*/*/*"))
    place = data.index(b"seed" if where == '"yaml": "' else b"n_layer", data.index(where.encode()))
    path.write_bytes(data[:place] + b"X" + data[place + 1 :])
    for item in verify_record(store).damaged:
        assert heal_damage(item, rebuild_description) is not None
    assert not path.exists(), "its YAML is damaged"
    for option in ("--unused", "--weights"):
        assert main(["gc", option, "--apply", "--store", str(store.path)]) == 1
    assert [file for file in files if not file.exists()] == []


def test_a_loop_of_links_is_no_result(tmp_path, store):
    before = measurements(store)
    path = store.trial_directory(store.trial_ids()[0]) / "result.json"
    path.unlink()
    path.symlink_to(path.name)
    assert Store(store.path).status(path.parent.name) == "damaged"
    (found,) = verify_record(store).damaged
    assert "no regular file" in found.reason
    assert heal_damage(found) is not None
    assert not path.is_symlink()
    path.symlink_to(path.name)
    drive(tiny_plan(tmp_path / "s", store), store, StubRun(store.path))
    assert measurements(store) == before


@pytest.mark.parametrize("damage", ["flip", "pipe"])
@pytest.mark.parametrize("kind", ["looks", "search"])
def test_what_was_decided_is_decided_again_from_the_results(tmp_path, decided, kind, damage):
    """Looks, rates that were tuned and the suggestions of a search lie in one file each."""
    shutil.copytree(decided[kind], tmp_path, dirs_exist_ok=True)
    store = Store(tmp_path / "runs")
    path = store.sweep_directory("s") / ("sweep.json" if kind == "looks" else "search.json")
    before, results = json.loads(path.read_text()), measurements(store)
    damage_file(path, damage, path)
    with store.driver_lock("s").hold():
        assert heal_description(store, "s") == [], "a driver may be about to write it"
    (line,) = heal_description(store, "s")
    assert line.startswith(f"sweeps/s/{path.name} is damaged: ")
    assert (path.parent / "damaged" / "1" / path.name).exists()
    decide(kind, tmp_path, store)
    again = json.loads(path.read_text())
    for content in (before, again):
        content.pop("sha256")
        content.get("search", content).pop("seconds", None)  # that the suggestions took
        content.pop("seconds", None)
    assert again == before
    assert measurements(store) == results


def decide(kind, folder, store):
    if kind == "looks":
        drive_looks(load_looks(folder), store)
    else:
        _, search, driver = searching(folder)
        driver.run()
        search.finish()


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    """Folders of a sweep that took looks, and of a search, both at their end."""
    folders = {}
    for kind in ("looks", "search"):
        folders[kind] = tmp_path_factory.mktemp(kind)
        decide(kind, folders[kind], Store(folders[kind] / "runs"))
    return folders
