"""MLflow made, away, damaged or served: what a sweep loses, and what `sync` makes of it."""

import errno
import json
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from kvlab.cli.main import main
from kvlab.cli.sweep_publishers import MLflowPublisher
from kvlab.errors import TrackingError
from kvlab.report import write_report
from kvlab.store import Store
from kvlab.track import Tracker
from tests.support.mlflow_contents import read_contents, read_files
from tests.support.mlflow_server import free_port, get, serve_mlflow
from tests.support.record_factory import Record
from tests.support.stub_trials import StubRun
from tests.support.tiny_sweep import write_tiny_sweep

ROOT = Path(__file__).parent.parent.parent
MAKE = "import sys; from kvlab.track import Tracker; Tracker(sys.argv[1])"


def tables(path):
    with sqlite3.connect(path) as database:
        return {name for (name,) in database.execute("select name from sqlite_master")}


def test_a_kill_while_the_database_is_made_leaves_none(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", MAKE, tmp_path], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not any(database.stat().st_size for database in tmp_path.glob(".mlflow-*/mlflow.db")):
        assert process.poll() is None, "it was made before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert not (tmp_path / "mlflow.db").exists()
    Tracker(tmp_path)
    assert {"runs", "metrics", "alembic_version"} <= tables(tmp_path / "mlflow.db")
    others = {path.name for path in tmp_path.iterdir() if not path.name.startswith("mlflow.lock")}
    assert others == {"mlflow.db", "tracking.id"}


def test_a_disk_that_is_full_keeps_no_part_of_a_database(tmp_path, monkeypatch):
    def fill(source, target):  # noqa: ARG001
        Path(target).write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvlab.track.connection.shutil.copyfile", fill)
    monkeypatch.setattr("kvlab.track.connection._open_client", lambda _: None)
    with pytest.raises(TrackingError, match="No space left"):
        Tracker(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.lock.1"}


def test_a_database_elsewhere_is_made_there(tmp_path):
    (tmp_path / "other").mkdir()
    Tracker(tmp_path / "store", f"sqlite:///{tmp_path}/other/mine.db")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["mine.db"]
    with pytest.raises(TrackingError, match="nosuch"):
        Tracker(tmp_path / "store", f"sqlite:///{tmp_path}/nosuch/mine.db")


def test_a_database_of_another_version_is_named_with_the_way_out(tmp_path, mlflow_template):
    path = tmp_path / "mlflow.db"
    shutil.copyfile(mlflow_template(), path)
    with sqlite3.connect(path) as database:
        database.execute("update alembic_version set version_num = '451aebb31d03'")
    with pytest.raises(TrackingError, match="found version 451aebb31d03.*sync --rebuild"):
        Tracker(tmp_path)


def test_a_database_that_cannot_be_written_is_said_so(tmp_path, mlflow_template, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MLflow makes a folder of such an address
    Record(factors={"heads": ("mha",)}, seeds=(0,)).write(tmp_path)
    shutil.copyfile(mlflow_template(), tmp_path / "other.db")
    tracker = Tracker(tmp_path, f"sqlite:///file:{tmp_path}/other.db?mode=ro&uri=true")
    with pytest.raises(TrackingError, match="readonly database.*`kvlab sync` catches up"):
        tracker.mirror("made")


@pytest.fixture
def store(tmp_path):
    """Two cells at two seeds; the trials started in another order than that of the sweep."""
    Record(factors={"heads": ("mha", "mqa")}, seeds=(0, 1), items=3).write(tmp_path / "runs")
    store = Store(tmp_path / "runs")
    for minute, trial in enumerate(reversed(store.sweep_trials("made"))):
        started = f"2026-01-01T00:0{minute}:00Z"
        result = store.result(trial)
        result["provenance"] |= {"started": started, "finished": f"2026-01-01T01:0{minute}:00Z"}
        (store.trial_directory(trial) / "result.json").unlink()
        store.write_result(result)
    return store


def hide(store, trials):
    """Takes results away; the function returned brings one back, as if it had ended now."""
    results = {trial: store.result(trial) for trial in trials}
    for trial in trials:
        (store.trial_directory(trial) / "result.json").unlink()
    return lambda trial: store.write_result(results[trial])


def test_mirrored_as_the_trials_end_is_the_same_as_a_sync_at_the_end(store, tmp_path):
    """Also for when the sweep began: the first trial to end need not be the first to start."""
    trials, uri = store.sweep_trials("made"), f"sqlite:///{store.path}/mlflow.db"
    end, options = hide(store, trials), Namespace(tracking_uri=None)
    mirror = MLflowPublisher(options, store, "made", pytest.fail)

    def read_statuses():
        runs = read_contents(uri, "made")
        return runs.pop("made")[0][0], len(runs)

    with store.driver_lock("made").hold():
        for number, trial in enumerate(trials, 1):
            end(trial)
            mirror.on_result(trial)
            assert read_statuses() == ("RUNNING", number)
    end = hide(store, trials[-1:])
    mirror.finish(None)
    assert read_statuses() == ("KILLED", 3), "nobody drives it, and it is not complete"
    end(trials[-1])
    assert mirror.finish(None) == {"uri": uri, "error": None}
    assert read_statuses() == ("FINISHED", 4)
    shutil.copytree(store.path, tmp_path / "other", ignore=shutil.ignore_patterns("mlflow.db"))
    Tracker(tmp_path / "other").mirror("made")
    assert read_contents(uri, "made") == read_contents(
        f"sqlite:///{tmp_path}/other/mlflow.db", "made"
    )


def test_without_mlflow_the_way_out_is_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(TrackingError, match="; run pip install mlflow; `kvlab sync` catches up$"):
        Tracker(tmp_path)


def test_submit_without_its_server_ends_with_one_warning_and_sync_catches_up(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    stub = lambda task, store, **_: StubRun(store)(task)  # noqa: E731
    monkeypatch.setattr("kvlab.cli.commands.submit.run_task", stub)
    write_tiny_sweep(tmp_path)
    store = ["--store", str(tmp_path / "runs"), "--no-report", "--json", "--tracking-uri"]
    submit = ["submit", str(tmp_path / "s.yaml"), "--executor", "inline"]
    host = f"127.0.0.1:{free_port()}"
    assert main([*submit, *store, f"http://me:secret@{host}"]) == 0
    shown = capsys.readouterr()
    assert "secret" not in shown.out + shown.err
    facts = json.loads(shown.out)
    assert facts["mlflow"]["uri"] == f"http://{host}"
    assert facts["states"] == {"done": 2, "missing": 0}
    assert "no server answers" in facts["mlflow"]["error"]
    assert shown.err.count("MLflow is not up to date") == 1
    assert "kvlab sync" in shown.err
    assert "Traceback" not in shown.err
    late = f"sqlite:///{tmp_path}/late.db"
    assert main(["sync", *store, late]) == 0
    assert json.loads(capsys.readouterr().out)[0]["written"] == 2
    assert {run[0][0] for run in read_contents(late, "s").values()} == {"FINISHED"}


def test_a_server_that_never_answers_is_given_up_soon(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.track.connection.PROBE_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with pytest.raises(TrackingError, match="no answer in 0.2 s; start it"):
            Tracker(tmp_path, f"http://user:secret@127.0.0.1:{port}")


@pytest.fixture(scope="module")
def server(tmp_path_factory, mlflow_template):
    home = tmp_path_factory.mktemp("server")
    shutil.copyfile(mlflow_template(), home / "mlflow.db")
    with serve_mlflow(home) as uri:
        yield uri


def test_mirroring_to_a_server(server, tmp_path, capsys):
    assert "<title>MLflow</title>" in get(server)
    record = Record(factors={"heads": ("mha", "mqa")}, seeds=(0,), items=9)
    store = record.write(tmp_path / "store")
    sections = ["answer", "cells", "effects", "hellaswag"]
    store.write_sweep({**store.sweep("made"), "report": {"sections": sections}})
    write_report(store, "made", tmp_path / "reports")
    report = tmp_path / "report"
    report.mkdir()
    (report / "report.md").write_text("# made")
    tracker = Tracker(store.path, server)
    assert tracker.mirror("made", report).written == 2
    assert tracker.mirror("made", report).written == 0
    assert capsys.readouterr().out == "", "commands print JSON there"
    assert not (store.path / "mlflow.db").exists()
    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name("made").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert set(runs) == {"made", "baseline seed 0", "mqa seed 0"}
    run_id = runs["mqa seed 0"].info.run_id
    assert len(client.get_metric_history(run_id, "train/loss")) == 5
    assert [f.path for f in client.list_artifacts(run_id)] == ["items.jsonl.gz", "result.json"]
    parent = client.list_artifacts(runs["made"].info.run_id, "report")
    assert [file.path for file in parent] == ["report/report.md"]
    shutil.rmtree(store.path)
    command = ["report", "made", "--tracking-uri", server, "--reports", str(tmp_path / "again")]
    assert main(command) == 0
    assert read_files(tmp_path / "again") == read_files(tmp_path / "reports")
