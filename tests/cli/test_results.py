"""`kvlab report`, `sync`, `ui`, and `explain`; `golden_errors/answers.txt` has their text."""

import json
import socket

import pytest

from kvlab.analysis.study import Study
from kvlab.cli.main import main
from kvlab.report import answer_text
from kvlab.store import Store
from tests.support.record_factory import Record

SMALL = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}
HEADS = {"heads": ("mha", "mqa")}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def store(tmp_path):
    store = Record(factors=SMALL, seeds=(0, 1)).write(tmp_path / "runs")
    store.write_sweep({**store.sweep("made"), "report": {"sections": ["answer", "pareto"]}})
    return store.path


def test_report_prints_the_answer_and_where_it_is(store, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    words = ["report", "made", "--sections", "answer"]
    assert main(words) == 0
    *lines, page, text = capsys.readouterr().out.splitlines()
    assert (page, text) == ("reports/made/report.html", "reports/made/report.md")
    answer = answer_text(Study.load(Store(store), "made"))
    assert " ".join(map(str.strip, lines)) == " ".join(answer.splitlines())
    assert 20 < max(map(len, lines)) <= 40
    assert main(["report", "made", "--reports", "other", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["report"], facts["answer"]) == ("other/made", answer)
    assert "figures/pareto.svg" in facts["files"]


@pytest.mark.usefixtures("store")
def test_ui_refuses_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["ui", "--port", str(port)]) == 2
        assert f"--port = {port} cannot be used" in capsys.readouterr().err


@pytest.mark.usefixtures("store")
def test_ui_names_a_server_without_its_password(capsys):
    assert main(["ui", "--tracking-uri", "https://me:secret@mlflow.example"]) == 0
    shown = capsys.readouterr().out
    assert "mlflow.example" in shown
    assert "secret" not in shown
