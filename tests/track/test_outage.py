"""MLflow away for a whole sweep, or from its middle on: what `sync` makes of it afterwards."""

import json
import shutil
import socket

import pytest

from kvlab.cli.main import main
from kvlab.cli.sweep_callbacks import MLflowCallback
from kvlab.errors import TrackingError
from kvlab.store import Store
from kvlab.track import Tracker
from tests.support.mlflow_contents import read_contents
from tests.support.mlflow_server import Server, free_port
from tests.support.record_factory import Record
from tests.support.tiny_sweep import write_tiny_sweep


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
    trials, uri = store.sweep_trials("made"), f"sqlite:///{store.path}/mlflow.db"
    end, mirror = hide(store, trials), MLflowCallback(store, "made", None, pytest.fail)

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


def test_submit_without_its_server_ends_with_one_warning_and_sync_catches_up(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    write_tiny_sweep(tmp_path)
    store = ["--store", str(tmp_path / "runs"), "--no-report", "--json", "--tracking-uri"]
    submit = ["submit", str(tmp_path / "s.yaml"), "--executor", "inline"]
    assert main([*submit, *store, f"http://127.0.0.1:{free_port()}"]) == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
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
