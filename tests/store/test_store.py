"""The record on disk: what is read back, what is passed over, what is refused."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.errors import LeaseLost, StoreError, UsageError
from kvlab.store import Store
from tests.support.stub_trials import StubRun, tiny_plan

ID = "0123456789abcdef"
OTHER = "fedcba9876543210"


def result(trial=ID, status="done", **more):
    return {"trial": trial, "training": OTHER, "status": status, "kv": {"owners": [0, 1]}, **more}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


def test_reading_makes_nothing(store):
    assert store.status(ID) is None
    assert store.result(ID) is None
    assert (store.trial_ids(), store.sweep_names(), store.attempts(ID)) == ([], [], [])
    answers = (store.is_running(ID), store.is_driven("s"), store.is_trained(ID))
    assert answers == (False, False, False)
    assert not store.path.exists()


def test_a_file_is_no_store(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(StoreError, match="is a file"):
        Store(tmp_path / "runs")


@pytest.mark.parametrize(
    "name", ["../../x", "..", ".", "", "/etc/passwd", "a/b", "x\n", "X", "x" * 65, "é", "a\0b"]
)
def test_a_name_never_becomes_another_path(store, name):
    for method in (store.sweep_directory, store.stop_flag, store.driver_lock, store.sweep):
        with pytest.raises(UsageError, match="is not a name"):
            method(name)
    with pytest.raises(UsageError):
        store.write_sweep({"name": name})
    assert not store.path.exists()


@pytest.mark.parametrize("trial", ["../../x", "..", "", "A" * 16, ID[:15], ID + "0", ID + "\n"])
def test_an_id_never_becomes_another_path(store, trial):
    for method in (
        store.trial_directory, store.training_directory, store.trial_lock, store.training_lock,
        store.status, store.result, store.create_attempt, store.is_trained,
    ):  # fmt: skip
        with pytest.raises(UsageError, match="is not 16 hex digits"):
            method(trial)
    with pytest.raises(UsageError):
        store.write_result(result(trial))
    assert not store.path.exists()


def test_a_result_comes_back(store):
    for status in ("done", "failed", "diverged"):
        store.write_result(result(status=status))
        assert store.status(ID) == status
        assert store.result(ID) == {"schema": 1, **result(status=status)}
        assert os.listdir(store.trial_directory(ID)) == ["result.json"]
        os.unlink(store.trial_directory(ID) / "result.json")


def test_a_result_is_written_once(store):
    store.write_result(result(status="failed"))
    with pytest.raises(LeaseLost, match="exists already"):
        store.write_result(result(status="done"))
    assert store.status(ID) == "failed"
    assert os.listdir(store.trial_directory(ID)) == ["result.json"]


def test_a_result_that_was_cut_anywhere_is_damaged_and_never_an_end(store):
    store.write_result(result(nested={"a": {"b": [1, {}]}}, last={"c": {}}))
    path = store.trial_directory(ID) / "result.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert store.status(ID) == "damaged"
    path.write_bytes(b"\0" * len(whole))
    assert store.status(ID) == "damaged"
    with pytest.raises(StoreError, match="cannot be read"):
        store.result(ID)


def test_a_sweeps_results_are_those_that_can_be_read(store):
    trials = {"0": ID, "1": OTHER, "2": "0" * 16}
    store.write_sweep({"name": "s", "cells": [{"levels": {}, "trials": trials}] * 2})
    for trial in (ID, OTHER):
        store.write_result(result(trial))
    (store.trial_directory(ID) / "result.json").write_text('{"schema": 1')
    assert store.sweep_trials("s") == [ID, OTHER, "0" * 16]
    assert [found["trial"] for found in store.results("s")] == [OTHER]


def test_names_that_are_not_ours_are_passed_over(store):
    store.write_result(result())
    store.write_sweep({"name": "s"})
    store.create_attempt(ID)
    for name in ("trials/.tmp", "trials/notes", f"trials/{ID}0", "sweeps/.s", "sweeps/empty"):
        (store.path / name).mkdir(parents=True)
    (store.trial_directory(ID) / "attempts" / ".DS_Store").write_text("")
    (store.trial_directory(ID) / ".result.json.x1y2").write_text('{"half')
    assert (store.trial_ids(), store.sweep_names()) == ([ID], ["s"])
    assert (store.attempts(ID), store.status(ID)) == ([1], "done")


def test_a_trial_is_found_by_its_first_digits(store):
    for trial in (ID, OTHER, "01" + "0" * 14):
        store.write_result(result(trial))
    assert store.find_trial("f") == OTHER
    assert store.find_trial(ID) == ID
    for prefix, text in (("01", "fits 2 trials"), ("", "fits 3 trials"), ("a", "is not in")):
        with pytest.raises(UsageError, match=text):
            store.find_trial(prefix)


def test_items_come_back_and_equal_items_are_equal_bytes(store):
    items = [{"ind": number, "text": "é"} for number in range(3)]
    store.write_items(ID, items)
    first = (store.trial_directory(ID) / "items.jsonl.gz").read_bytes()
    assert list(store.items(ID)) == items
    store.write_items(ID, iter(items))
    assert (store.trial_directory(ID) / "items.jsonl.gz").read_bytes() == first
    assert list(store.items(OTHER)) == []


def test_losses_by_document_come_back_and_equal_ones_are_equal_bytes(store):
    texts = {"loss": {"documents": [0, 3], "tokens": [5, 11], "nats": [10.25, 0.1]}}
    assert store.texts(ID) == {}
    store.write_texts(ID, texts)
    path = store.trial_directory(ID) / "texts.json.gz"
    first = path.read_bytes()
    assert store.texts(ID) == texts
    store.write_texts(ID, texts)
    assert path.read_bytes() == first
    for damage in (first[:20], gzip.compress(b"{")):
        path.write_bytes(damage)
        with pytest.raises(StoreError, match=r"texts\.json\.gz cannot be read"):
            store.texts(ID)


def test_outcomes_on_tasks_come_back_and_a_damaged_file_is_named(store):
    tasks = {"letters": {"items": "d1", "outcomes": {"lm_eval_letters_acc": [1.0, 0.0]}}}
    assert store.tasks(ID) == {}
    store.write_tasks(ID, tasks)
    assert store.tasks(ID) == tasks
    path = store.trial_directory(ID) / "tasks.json.gz"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(StoreError, match=r"tasks\.json\.gz cannot be read"):
        store.tasks(ID)


def test_a_result_that_is_set_aside_is_kept_with_its_attempt(store):
    store.create_attempt(ID)
    store.write_items(ID, [{"ind": 1}])
    store.write_result(result(status="failed"))
    store.archive_result(ID)
    assert store.status(ID) is None
    assert sorted(os.listdir(store.attempt_directory(ID, 1))) == ["items.jsonl.gz", "result.json"]
    assert store.create_attempt(ID) == 2


def test_a_training_is_done_with_its_record_and_its_weights(store):
    directory = store.training_directory(ID)
    (directory / "final").mkdir(parents=True)
    (directory / "final" / "model.safetensors").write_text("")
    assert not store.is_trained(ID)
    (directory / "training.json").write_text("{}")
    assert store.is_trained(ID)
    (directory / "final" / "model.safetensors").unlink()
    assert not store.is_trained(ID)


def test_an_attempt_without_room_is_a_broken_store(store):
    store.trial_directory(ID).mkdir(parents=True)
    (store.trial_directory(ID) / "attempts").write_text("in the way")
    with pytest.raises(StoreError, match="attempts"):
        store.create_attempt(ID)


RUN = """
import sys
from pathlib import Path
from kvlab.store import Store
from tests.support.stub_trials import StubRun, tiny_plan
folder = Path(sys.argv[1])
planned = tiny_plan(folder)
run = StubRun(folder / "runs")
print("ready", flush=True)
for one in planned.trials:
    run(one.trial)
"""


def test_a_kill_at_any_moment_leaves_results_whole_or_absent(tmp_path):
    planned, store = tiny_plan(tmp_path), Store(tmp_path / "runs")
    chance, root = random.Random(3), Path(__file__).parent.parent.parent
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", RUN, tmp_path], stdout=-1, cwd=root)
        process.stdout.readline()
        files = chance.randrange(1, 120)
        while process.poll() is None and sum(1 for _ in store.path.rglob("*")) < files:
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        for one in planned.trials:
            status, found = store.status(one.trial.id), store.result(one.trial.id)
            assert status in (None, "done")
            assert (found is None) == (status is None)
    run = StubRun(store.path)
    assert {run(one.trial) for one in planned.trials} == {"done"}
    facts = [json.dumps(store.result(one.trial.id)["measurements"]) for one in planned.trials]
    calm = StubRun(tmp_path / "calm")
    for one, found in zip(planned.trials, facts, strict=True):
        calm(one.trial)
        assert json.dumps(Store(tmp_path / "calm").result(one.trial.id)["measurements"]) == found
