"""`kvlab report`, `sync`, `ui` and `compare`, as a person calls them."""

import json
import socket
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from kvlab.analysis.study import Study
from kvlab.cli.main import main
from kvlab.report import answer_text
from kvlab.store import Store
from tests.support.record_factory import Record

SMALL = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Record(factors=SMALL, seeds=(0, 1)).write(tmp_path / "runs")
    sections = {"sections": ["answer", "cells", "pareto"]}
    store.write_sweep({**store.sweep("made"), "report": sections})
    return tmp_path / "runs"


@pytest.mark.usefixtures("store")
def test_report_prints_the_answer_and_where_it_is(store, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["report", "made"]) == 0
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
def test_report_for_a_paper(capsys, tmp_path):
    assert main(["report", "made", "--sections", "answer", "--paper", "paper"]) == 0
    assert "paper/main.tex shows them" in capsys.readouterr().out
    assert (tmp_path / "paper" / "made" / "methods.tex").exists()


def test_report_follows_a_sweep_until_its_driver_is_gone(tmp_path, monkeypatch, capsys):
    """Each look at the record is followed by what happens next in the sweep."""
    monkeypatch.chdir(tmp_path)
    record = Record(
        factors={"heads": ("mha", "mqa")},
        status=lambda _, seed: "done" if not seed else "missing",
        seeds=(0, 1),
    )
    store = record.write(tmp_path / "runs")
    driver = ExitStack()
    driver.enter_context(store.driver_lock("made").hold())
    mha, mqa = record.cells()
    steps = [
        lambda: None,
        lambda: record.write_result(store, mha, 1, "done"),
        lambda: (record.write_result(store, mqa, 1, "failed"), driver.close()),
    ]
    clock = SimpleNamespace(
        sleep=lambda _: steps.pop(0)(), monotonic=lambda: 0.0, strftime=lambda _: "12:00:00"
    )
    monkeypatch.setattr("kvlab.cli.commands.report.time", clock)
    assert main(["report", "made", "--watch", "--sections", "answer"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "12:00:00  made: 2 done, 2 missing  reports/made/report.html",
        "12:00:00  made: 3 done, 1 missing  reports/made/report.html",
        "12:00:00  made: 3 done, 1 failed  reports/made/report.html",
    ]
    assert "1 failed" in (tmp_path / "reports/made/report.md").read_text()


def test_report_of_a_sweep_that_nobody_drives_is_written_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Record(factors={"heads": ("mha", "mqa")}, status=lambda *_: "missing", seeds=(0,)).write(
        tmp_path / "runs"
    )
    assert main(["report", "made", "--watch", "--sections", "answer"]) == 0
    out = capsys.readouterr().out
    assert "made: 2 missing" in out
    assert out.endswith("no driver runs made; `kvlab submit` goes on with what is missing\n")


def test_sync_twice(store, capsys):
    assert main(["sync", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first == [
        {"sweep": "made", "experiment": "1", "written": 8, "unchanged": 0, "deleted": 0,
         "models": 0},
    ]  # fmt: skip
    assert main(["sync", "made"]) == 0
    assert capsys.readouterr().out == "made: 0 written, 8 unchanged, 0 deleted\n"
    assert (store / "mlflow.db").exists()


@pytest.mark.usefixtures("store")
def test_sync_reports_an_error_without_a_traceback(capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert main(["sync", "--tracking-uri", "http://127.0.0.1:9"]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "--tracking-uri" in message
    assert main(["sync", "nosuch"]) == 2


@pytest.mark.usefixtures("store")
def test_ui_refuses_what_it_cannot_do(tmp_path, capsys):
    assert main(["ui", "--store", str(tmp_path / "empty")]) == 2
    assert "no sweep yet" in capsys.readouterr().err
    assert not (tmp_path / "empty").exists()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["ui", "--port", str(port)]) == 2
        assert f"--port = {port}" in capsys.readouterr().err


@pytest.mark.usefixtures("store")
def test_compare_a_sweep_with_itself(capsys):
    assert main(["compare", "made", "made", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["warnings"] == []
    assert [cell["difference"] for cell in found["cells"]] == [0.0] * 4
    assert not any(one["changed"] for one in found["conclusions"])


@pytest.mark.usefixtures("store")
def test_compare_finds_what_changed_and_warns(tmp_path, capsys):
    class Later(Record):
        def result(self, levels, seed, status):
            found = super().result(levels, seed, status)
            found["provenance"]["commit"] = "f" * 40
            found["provenance"]["data"]["digest"] = "a" * 64
            return found

        def training(self, levels, seed):
            return super().training(levels, seed)[::-1]

    Record(factors=SMALL, seeds=(0, 1, 2, 3)).write(tmp_path / "first")
    Later(factors=SMALL, seeds=(0, 1, 2), effects={"mqa": -0.1}).write(tmp_path / "later")
    assert main(["compare", "made", "made", "--store", "first", "--store-b", "later"]) == 0
    text = capsys.readouterr().out
    assert "warning: code (commit) differ" in text
    assert "warning: data differ" in text
    line = next(line for line in text.splitlines() if line.startswith("heads=mqa"))
    assert line.split()[-3:] == ["worse", "better", "CHANGED"]
    assert "1 of 3 effects that both estimate changed" in text
    assert "cells that both have, paired by seed" in text
    assert "warning: seeds differ: 0, 1, 2, 3 against 0, 1, 2" in text


@pytest.mark.usefixtures("store")
def test_compare_finds_cells_interactions_and_rankings_that_changed(tmp_path, capsys):
    class Later(Record):
        def loss(self, levels, seed):
            both = levels["heads"] == "mqa" and levels["sharing"] == "trained"
            return super().loss(levels, seed) - (0.5 if both else 0.0)

    sizes = {"factors": {**SMALL, "sharing": ("none", "trained")}, "seeds": tuple(range(5))}
    Record(**sizes).write(tmp_path / "one")
    Later(**sizes).write(tmp_path / "later")
    arguments = ["compare", "made", "made", "--store", "one", "--store-b", "later", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    verdicts = {"+".join(cell["levels"].values()): cell["verdict"] for cell in found["cells"]}
    assert verdicts == {**dict.fromkeys(verdicts, "identical"), "mqa+trained": "differs"}
    changed = {one["about"] for one in found["conclusions"] if one["changed"]}
    assert "heads=mqa and sharing=trained" in changed
    moved = {one["about"]: one for one in found["conclusions"] if one["moved"]}
    assert "best within 1 MiB per 1,024 tokens" in moved


@pytest.mark.usefixtures("store")
def test_compare_warns_of_levels_that_share_only_a_name(tmp_path, capsys):
    class Other(Record):
        def description(self, cells):
            found = super().description(cells)
            found["patches"]["heads"]["mqa"] = {"model.n_kv_head": 2}
            return found

    Other(factors=SMALL, seeds=(0,)).write(tmp_path / "other")
    assert main(["compare", "made", "made", "--store-b", "other", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    warning = "heads=mqa sets model.heads: mqa against model.n_kv_head: 2"
    assert warning in found["warnings"]
    for cell in found["cells"]:
        assert cell["after"] - cell["before"] == pytest.approx(cell["difference"])
    # One seed concludes nothing, so nothing can have changed.
    assert not any(one["changed"] for one in found["conclusions"])


def test_reports_need_neither_torch_nor_ray_nor_mlflow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Record(factors=SMALL, seeds=(0, 1)).write(tmp_path / "runs")
    code = (
        "import sys; from kvlab.cli.main import main; main(['report', 'made']);"
        "print(sorted({'torch', 'ray', 'mlflow', 'optuna', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
