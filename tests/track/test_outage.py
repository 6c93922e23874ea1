"""MLflow away for a whole sweep, or from its middle on: what `sync` makes of it afterwards."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.cli.main import main
from kvlab.cli.sweep_callbacks import MLflowCallback
from kvlab.errors import TrackingError
from kvlab.store import Store
from kvlab.store.metrics import METRICS
from kvlab.track import Tracker
from kvlab.track.run_description import tracked_name
from tests.support.chaos_checks import is_reproducible
from tests.support.mlflow_contents import read_contents
from tests.support.mlflow_server import Server, free_port
from tests.support.record_factory import Record
from tests.support.tiny_sweep import write_tiny_sweep

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "KVLAB_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def store(tmp_path):
    """Two cells at two seeds; the trials started in another order than that of the sweep."""
    Record(factors={"heads": ("mha", "mqa")}, seeds=(0, 1), items=3).write(tmp_path / "runs")
    store = Store(tmp_path / "runs")
    for minute, trial in enumerate(reversed(store.sweep_trials("made"))):
        started = f"2026-01-01T00:0{minute}:00Z"
        directory = store.attempt_directory(trial, store.create_attempt(trial))
        (directory / "log.txt").write_text(f"{started} attempt 1\n")
        result = store.result(trial)
        result["provenance"] |= {"started": started, "finished": f"2026-01-01T01:0{minute}:00Z"}
        (store.trial_directory(trial) / "result.json").unlink()
        store.write_result(result)
    return store


_RECORD_NAMES = {tracked_name(name)[0]: name for name in METRICS}


def timeless(runs):
    """What two runs of the same sweep have in common: all but moments and what a clock measures.

    Of such metrics their names and steps stay, of files that hold such numbers their names.
    """
    timeless_runs = {}
    for name, (info, params, history, tags, files, datasets) in runs.items():
        metrics = {
            key: [
                (value if is_reproducible(_RECORD_NAMES.get(key, key)) else None, step)
                for value, _, step in points
            ]
            for key, points in history.items()
        }
        for own in ("kvlab.digest", "kvlab.store"):  # of the record, with its times
            assert tags.pop(own, None) or name == "s"
        facts = {"status": info[0], "params": params, "metrics": metrics, "tags": tags}
        timeless_runs[name] = {**facts, "files": sorted(files), "data": datasets}
    return timeless_runs


def hide(store, trials):
    """Takes results away; the function returned brings one back, as if it had ended now."""
    results = {trial: store.result(trial) for trial in trials}
    for trial in trials:
        (store.trial_directory(trial) / "result.json").unlink()
    return lambda trial: store.write_result(results[trial])


@pytest.mark.faults
def test_a_server_that_dies_in_mid_sweep_holds_everything_after_a_sync(
    store, tmp_path, capsys, mlflow_template
):
    (tmp_path / "server").mkdir()
    shutil.copy(mlflow_template(), tmp_path / "server" / "mlflow.db")
    server = Server(tmp_path / "server")
    try:
        trials, warned = store.sweep_trials("made"), []
        end = hide(store, trials)
        mirror = MLflowCallback(store, "made", server.uri, warned.append)
        with store.driver_lock("made").hold():
            for number, trial in enumerate(trials):
                end(trial)
                mirror.on_result(trial)
                if number == 1:
                    server.kill()
            assert "no server answers" not in warned[0], "it was there, so it was asked"
        assert mirror.finish(None)["error"]
        assert len(warned) == 1
        server.start()
        left = read_contents(server.uri, "made")
        assert left["made"][0][0] == "RUNNING", "else there is nothing to repair"
        command = ["sync", "made", "--store", str(store.path), "--no-report"]
        assert main([*command, "--tracking-uri", server.uri, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["written"] == 2
        runs = read_contents(server.uri, "made")
    finally:
        server.close()
    assert [name for name in left if name != "made" and left[name] != runs[name]] == []
    Tracker(store.path).mirror("made")
    always = read_contents(f"sqlite:///{store.path}/mlflow.db", "made")
    assert runs == always
    assert len(runs) == 5


def test_mirrored_as_the_trials_end_is_the_same_as_a_sync_at_the_end(store, tmp_path):
    """Also for when the sweep began: the first trial to end need not be the first to start."""
    trials = store.sweep_trials("made")
    end = hide(store, trials)
    mirror = MLflowCallback(store, "made", None, pytest.fail)
    with store.driver_lock("made").hold():
        for trial in trials:
            end(trial)
            mirror.on_result(trial)
    mirror.finish(None)
    shutil.copytree(store.path, tmp_path / "other", ignore=shutil.ignore_patterns("mlflow.db"))
    Tracker(tmp_path / "other").mirror("made")
    along, after = (
        read_contents(f"sqlite:///{folder}/mlflow.db", "made")
        for folder in (store.path, tmp_path / "other")
    )
    assert along == after


def test_submit_without_its_server_ends_soon_with_one_warning_and_sync_catches_up(
    tmp_path, monkeypatch, capsys
):
    """From the command line, in a process of its own; the server comes up when all is over."""
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    write_tiny_sweep(tmp_path)
    uri = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "kvlab.cli.main", "submit", str(tmp_path / "s.yaml")]
    ended = subprocess.run(
        [*command, "--executor", "inline", "--store", tmp_path / "runs", "--no-report", "--json",
         "--tracking-uri", uri],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    facts = json.loads(ended.stdout)
    assert facts["states"] == {"done": 2, "missing": 0}
    assert "no server answers" in facts["mlflow"]["error"]
    assert ended.stderr.count("MLflow is not up to date") == 1
    assert "kvlab sync" in ended.stderr
    assert "Traceback" not in ended.stderr
    late = f"sqlite:///{tmp_path}/late.db"
    command = ["sync", "--store", str(tmp_path / "runs"), "--no-report", "--tracking-uri"]
    assert main([*command, late]) == 0
    assert "2 written" in capsys.readouterr().out
    (tmp_path / "other").mkdir()  # the same sweep once more, with MLflow there from its start
    again = ["submit", str(tmp_path / "s.yaml"), "--store", str(tmp_path / "other")]
    again += ["--executor", "inline"]
    assert main([*again, "--no-report"]) == 0
    there = f"sqlite:///{tmp_path}/other/mlflow.db"
    runs, expected = timeless(read_contents(late, "s")), timeless(read_contents(there, "s"))
    assert runs.keys() == expected.keys()
    for run in expected:
        for kind in expected[run]:
            assert runs[run][kind] == expected[run][kind], run


def test_a_server_that_never_answers_is_given_up_soon(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.track.connection.PROBE_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with pytest.raises(TrackingError, match="no answer in 0.2 s; start it"):
            Tracker(tmp_path, f"http://user:secret@127.0.0.1:{port}")
