"""`kvlab submit --copy-to`, and `kvlab copy` to and from, on a real sweep."""

import json
import shutil
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvlab.cli.commands import submit
from kvlab.extensions.copy.publisher import CopyPublisher
from kvlab.store import Store
from tests.support.mlflow_contents import read_files
from tests.support.tiny_sweep import SHORT_REPORT, SWEEP, run_kvlab, tiny_sweep_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a sweep that was submitted with a copy."""
    with (
        tiny_sweep_folder(tmp_path_factory.mktemp("copied"), SWEEP + SHORT_REPORT) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(submit, "find_publishers", lambda: {"copy": CopyPublisher})
        options = ("--executor", "inline", "--copy-to", "copy", "--json")
        code, out, error = run_kvlab("submit", "s.yaml", *options)
        assert error.count("\n") > 2, "the progress"
        assert code == 0
        assert json.loads(out)["copy"] == {"url": "copy", "error": None}
        yield folder


def run(*words):
    code, out, error = run_kvlab(*words)
    assert (code, error) == (0, "")
    return out


def weights(store):
    return {
        path.relative_to(store): path.read_bytes()
        for path in Path(store).rglob("final/*.safetensors")
    }


def test_a_sweep_is_copied_as_it_runs_and_comes_back_with_its_report(folder):
    run("copy", "--to", f"file://{folder}/[1]", "--weights")
    assert "2 were there" in run("copy", "--from", "[1]")
    run("copy", "--to", f"file://{folder}/bucket", "--weights")
    names = sorted(path.name for path in (folder / "bucket").iterdir())
    assert names == ["s.tar.xz", "s.tar.xz.sha256"]
    shutil.move("runs", "gone")
    assert "s: 2 trials copied to runs" in run("copy", "--from", "copy")
    assert not weights("runs")
    assert "2 were there" in run("copy", "s", "--from", f"file://{folder}/bucket")
    assert weights("runs") == weights("gone")
    assert len(weights("runs")) == 2
    assert run("status", "s") == run("status", "s", "--store", "gone")
    shutil.move("reports/s", "before")
    run("report", "s")
    assert Path("reports/s/results.jsonl").read_text() == Path("before/results.jsonl").read_text()
    assert "nothing is missing" in run("submit", "s.yaml", "--executor", "inline", "--no-report")


def test_a_failing_copy_costs_one_warning_and_is_tried_again(folder, monkeypatch):
    (folder / "file").write_text("no folder")
    store, warnings = Store(folder / "runs"), []
    options = Namespace(copy_to=str(folder / "file"))
    copies = CopyPublisher(options, store, "s", warnings.append)
    for trial in store.trial_ids():
        copies.on_result(trial)
    assert copies.finish(None)["error"] is not None
    assert len(warnings) == 1
    assert "the sweep goes on without it" in warnings[0]
    (folder / "file").unlink()
    copies.on_result("")
    assert not (folder / "file").exists(), "some minutes must be between"
    monkeypatch.setattr("time.monotonic", lambda: 1e12)
    copies.on_result("")
    copies._thread.join()
    assert (folder / "file").is_dir()
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryDirectory", Mock(side_effect=OSError("the disk is full")))
        copies._options.copy_to = (folder / "url").as_uri()
        assert copies.finish(None)["error"] == "the disk is full"
    facts = json.loads(run("copy", "s", "--to", folder / "file", "--json"))
    assert [one["trials"] for one in facts] == [2]


def test_a_wrong_url_is_refused_before_anything_runs_or_text_is_prepared(folder, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(folder / "no-data-yet"))
    for url, expected, wanted in (
        ("nowhere://x", "Protocol not known", 2),
        ("new/copy", "lies in the store", 2),
        ("github://x", "missing 2 required", 2),
        ("ftp://127.0.0.1:1/x", "cannot be used: ConnectionRefusedError", 1),
    ):
        code, _, error = run_kvlab("submit", "s.yaml", "--store", "new", "--copy-to", url)
        assert (code, expected in error) == (wanted, True)
    assert not Path("new").exists()
    assert not (folder / "no-data-yet" / "datasets").exists()


def test_the_record_of_a_sweep_travels_as_one_file(folder):
    files = [folder / "a.tar.xz", folder / "b" / "b.tar.xz"]
    for file in files:
        assert f"s: 2 trials copied to {file}" in run("copy", "s", "--to", file)
    assert files[0].read_bytes() == files[1].read_bytes()
    run("report", "s", "--strict")
    archive = ("--store", "a.tar.xz")
    run("report", "s", *archive, "--reports", "again", "--strict")
    assert read_files(Path("again/s")) == read_files(Path("reports/s"))
    assert run("status", "s", *archive) == run("status", "s")
    run("verify", *archive)
    assert run_kvlab("copy", "other", "--from", "a.tar.xz")[0] == 2, "it is the record of s"
    assert run_kvlab("submit", "s.yaml", *archive)[0] in (1, 2)
    facts = json.loads(run("copy", "--from", "a.tar.xz", "--store", "unpacked", "--json"))
    assert [one["trials"] for one in facts] == [2]
    assert run("status", "s", "--store", "unpacked") == run("status", "s")
    assert not weights("unpacked")
