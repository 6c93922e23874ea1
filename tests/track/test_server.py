"""A real MLflow server with a database on loopback: as a page, and as a remote tracker."""

import re
import shutil
import subprocess

import pytest
from mlflow import MlflowClient

from kvlab.cli.main import main
from kvlab.report import write_report
from kvlab.track import Tracker, view_address
from kvlab.track.start_page import START_VARIABLE, create_app
from tests.support.mlflow_contents import read_files
from tests.support.mlflow_server import Server, get
from tests.support.record_factory import Record

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


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


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium to open the page with")
def test_the_page_opens_on_runs_with_filled_columns(server, tmp_path):
    """As `kvlab ui` prints its address: columns of factor, loss and cache."""
    record = Record(name="shown", factors={"heads": ("mha", "mqa")}, seeds=(0,))
    tracker = Tracker(record.write(tmp_path / "store").path, server)
    address = view_address(server, tracker.mirror("shown").experiment)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += [f"--user-data-dir={tmp_path}/profile", "--window-size=1600,900"]
    shown = subprocess.run(
        [BROWSER, *options, "--virtual-time-budget=30000", "--dump-dom", address],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    text = re.sub(r"<style.*?</style>|<script.*?</script>", "", shown.stdout, flags=re.DOTALL)
    words = [word.strip() for word in re.sub(r"<[^>]+>", "\n", text).split("\n")]
    for expected in ("heads", "mqa", "seed", "quality/loss_served", "kv/bytes", str(2**18)):
        assert expected in words


def test_the_first_page_starts_with_model_training(monkeypatch):
    """Asked of the app that `kvlab ui` serves; what a browser has chosen before stays."""
    from mlflow.server import app as pages

    monkeypatch.setattr(pages, "after_request_funcs", {**pages.after_request_funcs, None: []})
    monkeypatch.setenv(START_VARIABLE, "/experiments/1/runs?a=b</script>")
    create_app()
    answer = pages.test_client().get("/")
    text = answer.get_data(as_text=True)
    head = text[text.index("<head>") : text.index("</script>")]
    assert '"mlflow.workflowType_v1": "machine_learning"' in head
    assert "getItem(name) === null" in head
    assert "/experiments/1/runs?a=b<" in head
    assert text.index("localStorage") < text.index("static/js/main")
    assert "ETag" not in answer.headers, "a browser may have the page as it was"
