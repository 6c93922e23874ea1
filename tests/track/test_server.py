"""A real MLflow server on loopback, as `kvlab ui` starts it: as a page, and as a remote tracker."""

import socket
import subprocess
import time
import urllib.request

import pytest
from mlflow import MlflowClient

from kvlab.track import Tracker
from kvlab.track.server import server_command
from tests.report.factory import Record


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


@pytest.fixture
def server(tmp_path):
    port = free_port()
    home = tmp_path / "server"
    home.mkdir()
    command = server_command(f"sqlite:///{home}/mlflow.db", home, port)
    with open(home / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=home, stdout=log, stderr=log)
    uri = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                assert get(f"{uri}/health") == "OK"
                break
            except OSError:
                assert process.poll() is None, (home / "log").read_text()
                time.sleep(0.2)
        yield uri
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_mirroring_to_a_server(server, tmp_path):
    assert "<title>MLflow</title>" in get(server)
    store = Record(factors={"heads": ("mha", "mqa")}, seeds=(0,)).write(tmp_path / "store")
    report = tmp_path / "report"
    report.mkdir()
    (report / "report.md").write_text("# made")
    tracker = Tracker(store.path, server)
    assert tracker.mirror("made", report).written == 2
    assert tracker.mirror("made", report).written == 0
    assert not (store.path / "mlflow.db").exists()
    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name("made").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert set(runs) == {"made", "baseline seed 0", "mqa seed 0"}
    run_id = runs["mqa seed 0"].info.run_id
    assert len(client.get_metric_history(run_id, "train_loss")) == 5
    assert [file.path for file in client.list_artifacts(run_id)] == ["result.json"]
    parent = client.list_artifacts(runs["made"].info.run_id, "report")
    assert [file.path for file in parent] == ["report/report.md"]
