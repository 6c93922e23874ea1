"""A real MLflow server with a database on loopback: as a page, and as a remote tracker."""

import shutil
import socket
import subprocess
import time
import urllib.request

import pytest
from mlflow import MlflowClient

from kvlab.cli.main import main
from kvlab.report import write_report
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


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def server(tmp_path):
    port = free_port()
    home = tmp_path / "server"
    home.mkdir()
    command = server_command(f"sqlite:///{home}/mlflow.db", home, port)
    # As a remote one: artifacts go through the server, no folder is shared with it.
    place = command.index("--default-artifact-root")
    command[place : place + 2] = ["--artifacts-destination", str(home / "artifacts")]
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


def test_mirroring_to_a_server(server, tmp_path, capsys):
    assert "<title>MLflow</title>" in get(server)
    record = Record(factors={"heads": ("mha", "mqa")}, seeds=(0,), items=9)
    store = record.write(tmp_path / "store")
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
    assert len(client.get_metric_history(run_id, "train_loss")) == 5
    assert [f.path for f in client.list_artifacts(run_id)] == ["items.jsonl.gz", "result.json"]
    parent = client.list_artifacts(runs["made"].info.run_id, "report")
    assert [file.path for file in parent] == ["report/report.md"]
    shutil.rmtree(store.path)
    command = ["report", "made", "--tracking-uri", server, "--out", str(tmp_path / "again")]
    assert main(command) == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "reports")
