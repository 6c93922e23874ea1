"""Files of the record that are sealed and wrong: refused with the place, or read as if missing."""

import gzip
import shutil

import pytest

from kvlab.cli.commands import COMMANDS
from kvlab.cli.main import main
from kvlab.cli.progress_display import format_outcome
from kvlab.errors import RecordDamaged, StoreError
from kvlab.fs.atomic_files import read_json
from kvlab.fs.sealed_files import read_sealed_json, seal_bytes, write_sealed_json
from kvlab.store import Store, trial_records
from tests.support.record_factory import Record


@pytest.fixture
def record(tmp_path):
    made = Record(factors={"heads": ("mha", "mqa")}, seeds=(0, 1), items=4)
    return made, made.write(tmp_path / "runs")


def change(path, **values):
    """Replace values by dotted key, and seal the file anew, as somebody who means harm."""
    content = read_sealed_json(path)
    for key, value in values.items():
        *above, last = key.split("__")
        place = content
        for part in above:
            place = place[part]
        place[last] = value
    write_sealed_json(path, content)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"measurements__loss": "2.5"}, "measurements.loss"),
        ({"measurements__loss": 10**400}, "measurements.loss"),
        ({"measurements": []}, "measurements"),
        ({"curves__validation_loss": [[1, 2]]}, "curves.validation_loss.0"),
        ({"error": True}, "error"),
        ({"training": "../../x"}, "training"),
    ],
)
def test_a_result_has_the_types_that_are_written(record, capsys, values, place):
    made, store = record
    trial = made.trial({"heads": "mqa"}, 1)
    change(store.trial_directory(trial) / "result.json", **values)
    with pytest.raises(RecordDamaged, match=rf"damaged: {place} has a value .* not write \("):
        store.result(trial)
    words = ["--store", str(store.path)]
    assert main(["verify", "made", *words]) == 1
    assert f"result.json: {place} has a value" in capsys.readouterr().out
    assert main(["status", "made", *words]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cells": 0}, "cells has a value"),
        ({"factors": {"heads": []}}, "factors.heads has a value"),
        ({"factors": {"heads": ["mha", "gqa"]}}, "do not have the cell mqa"),
        ({"patches": {"heads": {"mqa": ""}}}, "patches.heads.mqa has a value"),
    ],
)
def test_a_sweep_has_the_types_that_are_written(record, capsys, values, message):
    store = record[1]
    change(store.sweep_directory("made") / "sweep.json", **values)
    for command in ("status", "report"):
        assert main([command, "made", "--store", str(store.path)]) == 1
        assert message in capsys.readouterr().err


def test_what_one_reader_uses_is_refused_where_it_is_read(record, capsys, tmp_path):
    store = record[1]
    change(store.sweep_directory("made") / "sweep.json", decide={"alpha": "x"})
    words = ["--store", str(store.path), "--reports", str(tmp_path)]
    assert main(["report", "made", *words]) == 1
    error = capsys.readouterr().err
    assert "the record of made has a value that kvlab cannot read" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1, "a": 2}', "a key twice"),
        ('{"a": NaN}', "number NaN"),
        ("9" * 5000, "4300 digits"),
        ("", "Expecting value"),
    ],
)
def test_json_is_one_value_that_is_finite(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=message):
        read_json(path)


def test_details_that_unpack_to_anything_are_refused(record, monkeypatch):
    made, store = record
    trial = made.trial({"heads": "mha"}, 0)
    path = store.trial_directory(trial) / "items.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 100_000))
    change(path.with_name("result.json"), files={"items.jsonl.gz": seal_bytes(path.read_bytes())})
    monkeypatch.setattr(trial_records, "MAX_JSON_BYTES", 1000)
    with pytest.raises(RecordDamaged, match="unpacks to more than 1,000 bytes"):
        Store(store.path).items_text(trial)


def test_a_result_is_no_record_of_a_training(record, capsys):
    made, store = record
    trial = made.trial({"heads": "mqa"}, 1)
    directory = store.training_directory(store.result(trial)["training"])
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(store.trial_directory(trial) / "result.json", directory / "training.json")
    assert "final/model.safetensors" in store.check_training(directory.name)
    assert main(["verify", "--store", str(store.path)]) == 1
    assert "training.json" in capsys.readouterr().out


def test_a_result_that_lacks_a_part_is_told_of_without_it(record):
    made, store = record
    trial = made.trial({"heads": "mqa"}, 1)
    path = store.trial_directory(trial) / "result.json"
    content = read_sealed_json(path)
    for key in ("error", "measurements", "provenance"):
        write_sealed_json(path, {name: value for name, value in content.items() if name != key})
        assert isinstance(format_outcome(store, trial), str)
        assert main(["status", "made", "--store", str(store.path)]) in (0, 1)
    write_sealed_json(path, {**content, "files": "9"})
    assert store.status(trial) == "damaged"
    if "gc" in COMMANDS:
        assert main(["gc", "--weights", "--store", str(store.path)]) == 0


def test_what_a_record_says_is_quoted_without_hidden_characters(record):
    _, store = record
    change(store.sweep_directory("made") / "sweep.json", name="\x1b[31m")
    with pytest.raises(RecordDamaged, match="damaged: it is of") as caught:
        store.sweep("made")
    assert str(caught.value).isprintable()
    change(store.sweep_directory("made") / "sweep.json", name="made")
    content = read_sealed_json(store.sweep_directory("made") / "sweep.json")
    content["baseline"]["heads"] = "\x1b[31m\u202emha"
    write_sealed_json(store.sweep_directory("made") / "sweep.json", content)
    with pytest.raises(RecordDamaged, match="do not have the cell") as caught:
        store.sweep("made")
    assert str(caught.value).isprintable()
