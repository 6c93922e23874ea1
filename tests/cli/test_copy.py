"""`kvlab submit --copy-to --notify`, and `kvlab copy` to and from, on a real sweep."""

import json
import shutil
from pathlib import Path

import pytest

from kvlab.cli.sweep_callbacks import BackupCallback
from kvlab.store import Store
from tests.support.tiny_sweep import call, tiny_place


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with tiny_place(tmp_path_factory.mktemp("copied")) as folder:
        yield folder


@pytest.fixture(scope="module")
def submitted(place):  # noqa: ARG001
    options = ("--executor", "inline", "--copy-to", "copy", "--notify", "cat > told.json")
    return call("submit", "s.yaml", *options)


def weights(store):
    return {
        path.relative_to(store.path): path.read_bytes()
        for path in Path(store.path).rglob("final/*.safetensors")
    }


def test_a_sweep_is_copied_as_it_runs_and_comes_back_with_its_report(place, submitted):
    assert submitted[0] == 0
    assert submitted[2] == ""
    (place / "elsewhere").mkdir()
    shutil.move("runs", "gone")
    code, out, error = call("copy", "--from", "copy")
    assert (code, error) == (0, "")
    assert "s: 2 trials copied to runs" in out
    assert weights(Store("runs")) == weights(Store("gone"))
    assert len(weights(Store("runs"))) == 2
    assert call("status", "s")[1] == call("status", "s", "--store", "gone")[1]
    shutil.move("reports/s", "before")
    assert call("report", "s")[0] == 0
    assert Path("reports/s/results.jsonl").read_text() == Path("before/results.jsonl").read_text()
    code, out, _ = call("submit", "s.yaml", "--executor", "inline", "--no-report")
    assert "nothing is missing" in out


def test_the_end_is_told(place, submitted):  # noqa: ARG001
    told = json.loads((place / "told.json").read_text())
    assert (told["sweep"], told["outcome"], told["exit_code"]) == ("s", "done", 0)
    assert told["states"] == {"done": 2, "missing": 0}
    assert told["report"] == "reports/s"
    assert told["copy"]["error"] is None
    assert told["copy"]["url"].endswith("copy")


def test_a_place_that_fails_costs_one_warning_and_is_brought_up_to_date_later(place, submitted):  # noqa: ARG001
    (place / "file").write_text("no folder")
    told = []
    store = Store(place / "runs")
    copier = BackupCallback(store, "s", str(place / "file"), told.append)
    for trial in store.trial_ids():
        copier.on_result(trial)
    facts = copier.finish()
    assert len(told) == 1
    assert "the sweep goes on without it" in told[0]
    assert facts["error"] is not None
    (place / "file").unlink()
    code, out, _ = call("copy", "s", "--to", place / "file", "--json")
    assert code == 0
    assert [one["trials"] for one in json.loads(out)] == [2]
    assert [one["files"] for one in json.loads(call("copy", "--to", "file", "--json")[1])] == [0]


def test_a_wrong_place_is_refused_before_anything_runs(place):  # noqa: ARG001
    for url, wanted in (("nowhere://x", "Protocol not known"), ("new/copy", "lies in the store")):
        code, _, error = call("submit", "s.yaml", "--store", "new", "--copy-to", url)
        assert code == 2
        assert wanted in error
    assert not Path("new").exists()
    code, _, error = call("copy", "nothing", "--to", "copy")
    assert code == 2
    assert "sweep = nothing is not in the store" in error
