"""A real MLflow server with a database on loopback: as a page, and as a remote tracker."""

import shutil

import pytest
from mlflow import MlflowClient

from kvlab.cli.main import main
from kvlab.report import write_report
from kvlab.track import Tracker
from tests.support.mlflow_contents import read_files
from tests.support.mlflow_server import Server, get
from tests.support.record_factory import Record


@pytest.fixture(scope="module")
def server(tmp_path_factory, mlflow_template):
    home = tmp_path_factory.mktemp("server")
    shutil.copyfile(mlflow_template(), home / "mlflow.db")
    running = Server(home)
    yield running.uri
    running.close()


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
