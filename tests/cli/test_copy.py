"""`kvlab submit --copy-to --notify`, and `kvlab copy` to and from, on a real sweep."""

import json
import shutil
from pathlib import Path

import pytest

from kvlab.cli.sweep_callbacks import BackupCallback
from kvlab.store import Store
from tests.support.mlflow_contents import read_files
from tests.support.tiny_sweep import SHORT_REPORT, SWEEP, run_kvlab, tiny_sweep_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with tiny_sweep_folder(tmp_path_factory.mktemp("copied"), SWEEP + SHORT_REPORT) as folder:
        yield folder


@pytest.fixture(scope="module")
def submitted(folder):  # noqa: ARG001
    options = ("--executor", "inline", "--copy-to", "copy", "--notify", "cat > notice.json")
    return run_kvlab("submit", "s.yaml", *options)


def weights(store):
    return {
        path.relative_to(store.path): path.read_bytes()
        for path in Path(store.path).rglob("final/*.safetensors")
    }


def test_a_sweep_is_copied_as_it_runs_and_comes_back_with_its_report(folder, submitted):
    assert submitted[0] == 0
    assert submitted[2] == ""
    code, out, error = run_kvlab("copy", "--to", f"file://{folder}/bucket", "--weights")
    assert (code, error) == (0, "")
    assert sorted(path.name for path in (folder / "bucket").iterdir()) == [
        "s.tar.xz", "s.tar.xz.sha256"
    ]  # fmt: skip
    shutil.move("runs", "gone")
    code, out, error = run_kvlab("copy", "--from", "copy")
    assert (code, error) == (0, "")
    assert "s: 2 trials copied to runs" in out
    assert not weights(Store("runs"))
    code, out, error = run_kvlab("copy", "s", "--from", f"file://{folder}/bucket")
    assert (code, error) == (0, "")
    assert "2 were there" in out
    assert weights(Store("runs")) == weights(Store("gone"))
    assert len(weights(Store("runs"))) == 2
    assert run_kvlab("status", "s")[1] == run_kvlab("status", "s", "--store", "gone")[1]
    shutil.move("reports/s", "before")
    assert run_kvlab("report", "s")[0] == 0
    assert Path("reports/s/results.jsonl").read_text() == Path("before/results.jsonl").read_text()
    code, out, _ = run_kvlab("submit", "s.yaml", "--executor", "inline", "--no-report")
    assert "nothing is missing" in out


def test_the_notification_has_the_summary(folder, submitted):  # noqa: ARG001
    notice = json.loads((folder / "notice.json").read_text())
    assert (notice["sweep"], notice["outcome"], notice["exit_code"]) == ("s", "done", 0)
    assert notice["states"] == {"done": 2, "missing": 0}
    assert notice["report"] == "reports/s"
    assert notice["copy"]["error"] is None
    assert notice["copy"]["url"].endswith("copy")


def test_a_failing_backup_costs_one_warning_and_is_completed_later(folder, submitted):  # noqa: ARG001
    (folder / "file").write_text("no folder")
    warnings = []
    store = Store(folder / "runs")
    backup = BackupCallback(store, "s", str(folder / "file"), warnings.append)
    for trial in store.trial_ids():
        backup.on_result(trial)
    facts = backup.finish()
    assert len(warnings) == 1
    assert "the sweep goes on without it" in warnings[0]
    assert facts["error"] is not None
    (folder / "file").unlink()
    code, out, _ = run_kvlab("copy", "s", "--to", folder / "file", "--json")
    assert code == 0
    assert [one["trials"] for one in json.loads(out)] == [2]


def test_a_wrong_url_is_refused_before_anything_runs(folder):  # noqa: ARG001
    for url, expected in (("nowhere://x", "Protocol not known"), ("new/copy", "lies in the store")):
        code, _, error = run_kvlab("submit", "s.yaml", "--store", "new", "--copy-to", url)
        assert code == 2
        assert expected in error
    assert not Path("new").exists()


def test_the_record_of_a_sweep_travels_as_one_file(folder, submitted):  # noqa: ARG001
    files = [folder / "a.tar.xz", folder / "b" / "b.tar.xz"]
    for file in files:
        code, out, error = run_kvlab("copy", "s", "--to", file)
        assert (code, error) == (0, "")
        assert f"s: 2 trials copied to {file}" in out
    assert files[0].read_bytes() == files[1].read_bytes()
    assert run_kvlab("report", "s", "--strict")[0] == 0
    assert run_kvlab("report", "s", "--store", files[0], "--reports", "again", "--strict")[0] == 0
    assert read_files(Path("again/s")) == read_files(Path("reports/s"))
    assert run_kvlab("status", "s", "--store", "a.tar.xz")[1] == run_kvlab("status", "s")[1]
    assert run_kvlab("verify", "--store", "a.tar.xz")[0] == 0
    assert run_kvlab("copy", "other", "--from", "a.tar.xz")[0] == 2, "it is the record of s"
    assert run_kvlab("submit", "s.yaml", "--store", "a.tar.xz")[0] in (1, 2)
    code, _, error = run_kvlab("compare", "s", "s", "--store", "a.tar.xz", "--store-b", "runs")
    assert (code, error) == (0, "")
    trial = Store("runs").trial_ids()[0]
    code, out, _ = run_kvlab("compare", "--trials", f"a.tar.xz:{trial}", f"runs:{trial}")
    assert code == 0
    code, out, error = run_kvlab("copy", "--from", "a.tar.xz", "--store", "unpacked", "--json")
    assert (code, error) == (0, "")
    assert [one["trials"] for one in json.loads(out)] == [2]
    assert run_kvlab("status", "s", "--store", "unpacked")[1] == run_kvlab("status", "s")[1]
    assert not weights(Store("unpacked"))
