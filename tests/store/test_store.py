"""The record on disk: what is read back, what is passed over, what is refused."""

import gzip
import json
import os

import pytest

from kvlab.analysis.trial_rows import read_rows
from kvlab.errors import LeaseLost, RecordDamaged, StoreError, UsageError
from kvlab.fs.sealed_files import seal_json
from kvlab.own_extensions import load_parts
from kvlab.store import Store
from kvlab.store.record_forms import read_record
from kvlab.store.trial_records import DETAIL_FILES
from kvlab.store.verification import heal, verify_record
from kvlab.sweep.driver.driver_registry import join_sweep

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
    store.path.write_text("")
    with pytest.raises(UsageError, match="is a file"):
        Store(store.path)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [(name, "a name") for name in ("../../x", ".", "", "/etc/passwd", "a/b", "x\n", "X", "x" * 65)]
    + [(one, "16 hex") for one in ("../../x", "", "A" * 16, ID[:15], ID + "0", ID + "\n")],
)
def test_a_name_or_an_id_never_becomes_another_path(store, wrong, kind):
    of_sweeps = (store.sweep_directory, store.stop_flag, store.driver_lock, store.sweep,
                 lambda name: store.write_sweep({"name": name}))  # fmt: skip
    of_trials = (
        store.trial_directory, store.training_directory, store.trial_lock, store.training_lock,
        store.status, store.result, store.create_attempt, store.is_trained,
        lambda trial: store.write_result(result(trial)),
    )  # fmt: skip
    for method in of_sweeps if kind == "a name" else of_trials:
        with pytest.raises(UsageError, match=f"is not {kind}"):
            method(wrong)
    assert not store.path.exists()


def test_a_result_is_written_once_comes_back_and_is_never_the_end_where_it_was_cut(store):
    path = store.trial_directory(ID) / "result.json"
    for status in ("failed", "diverged", "done"):
        path.unlink(missing_ok=True)
        store.write_result(result(status=status, last={"c": {}}))
        assert store.status(ID) == status
        assert store.result(ID) == {"schema": 1, **result(status=status, last={"c": {}})}
        with pytest.raises(LeaseLost, match="exists already"):
            store.write_result(result(status="failed"))
        assert store.status(ID) == status
        assert os.listdir(path.parent) == [path.name]
    whole = path.read_bytes()
    for cut in (*(whole[:length] for length in range(0, len(whole), 3)), b"\0" * len(whole)):
        path.write_bytes(cut)
        assert store.status(ID) == "damaged"
    with pytest.raises(RecordDamaged, match="is damaged"):
        store.result(ID)


def test_a_sweeps_results_are_those_that_can_be_read(store):
    trials = {"0": ID, "1": OTHER, "2": "0" * 16}
    cells = [{"levels": {}, "trials": trials}] * 2
    store.write_sweep({"name": "s", "factors": {}, "cells": cells})
    for trial in (ID, OTHER):
        store.write_result(result(trial))
    (store.trial_directory(ID) / "result.json").write_text('{"schema": 1')
    assert store.sweep_trials("s") == [ID, OTHER, "0" * 16]
    assert [found["trial"] for found in store.results("s")] == [OTHER]


def test_what_a_later_version_has_written_is_refused_and_stays_in_its_place(store):
    """It is not damaged: healed, it would be moved aside, and its trial run again."""
    cells = [{"levels": {"heads": "mha"}, "trials": {"0": ID}}]
    store.write_sweep({"name": "s", "factors": {"heads": ["mha"]}, "cells": cells})
    store.write_result(result())
    sweep = store.sweep("s")
    paths = [store.sweep_directory("s") / "sweep.json", store.trial_directory(ID) / "result.json"]
    for path in paths:
        path.write_bytes(seal_json({**read_record(path), "schema": 2}))
    later = [path.read_bytes() for path in paths]
    uses = (
        lambda: store.sweep("s"),
        lambda: store.status(ID),
        lambda: read_rows(store, sweep),
        lambda: verify_record(store),
        lambda: heal(store.trial_directory(ID)),
        lambda: join_sweep(store, "s", {"name": "s"}, exclusive=False).__enter__(),
    )
    for use in uses:
        with pytest.raises(StoreError, match="is of a later version of kvlab") as error:
            use()
        assert type(error.value) is StoreError
    assert [path.read_bytes() for path in paths] == later


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


DETAILS = {
    "items": [{"ind": number, "text": "é"} for number in range(3)],
    "texts": {"loss": {"documents": [0, 3], "tokens": [5, 11], "nats": [10.25, 0.1]}},
} | {name: {"a": [1.0, 0.0]} for one in load_parts().values() for name in one.details}


def write_all(store, trial=ID, **changes):
    details = DETAILS | changes
    store.write_result({**result(trial), "files": store.write_details(trial, **details)})


def test_details_come_back_and_equal_ones_are_equal_bytes(store):
    assert (store.items_text(ID), store.texts(ID)) == (b"", {})
    write_all(store)
    write_all(store, OTHER)
    for trial in (ID, OTHER):
        items = [*map(json.loads, store.items_text(trial).splitlines())]
        found = {"items": items} | {
            name: store.details(trial, name) for name in DETAILS if name != "items"
        }
        assert found == DETAILS
    for name in DETAIL_FILES:
        one, other = (store.trial_directory(trial) / name for trial in (ID, OTHER))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("name", DETAIL_FILES)
def test_details_other_than_those_of_the_result_are_damaged(store, name):
    write_all(store)
    changed = {key: {"loss": {"tokens": [1]}} for key in DETAILS} | {"items": [{"ind": 7}]}
    write_all(store, OTHER, **changed)
    path, others = (store.trial_directory(trial) / name for trial in (ID, OTHER))
    whole = path.read_bytes()
    flipped = bytes([*whole[:30], whole[30] ^ 1, *whole[31:]])

    def read(trial):
        if name.startswith("items"):
            return store.items_text(trial)
        return store.details(trial, name.removesuffix(".json.gz"))

    for damage in (whole[:20], b"", flipped, gzip.compress(b"{"), others.read_bytes()):
        path.write_bytes(damage)
        assert store.status(ID) == "damaged"
        for reader in (read, store.result):
            with pytest.raises(RecordDamaged, match=f"{name} is damaged"):
                reader(ID)
    path.unlink()
    with pytest.raises(RecordDamaged, match=f"{name} is missing"):
        read(ID)


def test_what_was_read_of_old_files_is_read_again_when_one_changes(store):
    def age(seconds):
        for path in store.trial_directory(ID).iterdir():
            os.utime(path, (seconds, seconds))

    write_all(store)
    age(1000)
    assert [store.status(ID), store.texts(ID)] == ["done", DETAILS["texts"]]
    path = store.trial_directory(ID) / "texts.json.gz"
    whole = path.read_bytes()
    for content, ended in ((whole[:-1], "damaged"), (whole, "done"), (whole, "done")):
        path.write_bytes(content)
        age(1000)
        assert store.status(ID) == ended
    path.write_bytes(bytes([*whole[:30], whole[30] ^ 1, *whole[31:]]))
    age(1000)
    assert store.status(ID) == "done", "the same size, time and inode"
    age(2000)
    assert store.status(ID) == "damaged"
    with pytest.raises(RecordDamaged):
        store.texts(ID)


def test_details_of_a_trial_that_ran_again_are_those_of_its_new_result(store):
    write_all(store)
    reader = Store(store.path)
    assert reader.texts(ID) == DETAILS["texts"]
    store.create_attempt(ID)
    store.archive_result(ID)
    assert store.status(ID) is None
    kept = sorted(os.listdir(store.attempt_directory(ID, 1)))
    assert kept == sorted([*DETAIL_FILES, "result.json"])
    assert store.create_attempt(ID) == 2
    write_all(store, texts={"loss": {"tokens": [7]}})
    assert reader.texts(ID) == {"loss": {"tokens": [7]}}
