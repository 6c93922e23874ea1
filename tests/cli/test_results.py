"""`kvlab report`, `sync`, `ui`, and `explain`; `golden_errors/answers.txt` has their text."""

import hashlib
import json
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from kvlab.analysis.study import Study
from kvlab.cli.live_server import listen
from kvlab.cli.main import main
from kvlab.report import answer_text
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document
from kvlab.store import Store
from tests.support.record_factory import FACTORS, Record, ServedRecord
from tests.support.stub_trials import StubRun, tiny_plan

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


def test_report_prints_the_answer_and_where_it_is(store, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "40")
    words = ["report", "made", "--sections", "answer", "--paper", "paper"]
    assert main(words) == 0
    *lines, page, text, parts, shown = capsys.readouterr().out.splitlines()
    assert (page, text) == ("reports/made/report.html", "reports/made/report.md")
    answer = answer_text(Study.load(Store(store), "made"))
    assert " ".join(map(str.strip, lines)) == " ".join(answer.splitlines())
    assert 20 < max(map(len, lines)) <= 40
    assert "methods.tex" in parts
    assert shown.startswith("paper/main.tex shows them")
    assert (tmp_path / "paper" / "made" / "methods.tex").exists()
    assert main(["report", "made", "--reports", "other", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["report"], facts["answer"]) == ("other/made", answer)
    assert "figures/pareto.svg" in facts["files"]


def test_report_follows_a_sweep_until_its_driver_is_gone(tmp_path, monkeypatch, capsys):
    """Each look at the record is followed by what happens next in the sweep."""
    record = Record(
        factors=HEADS, status=lambda _, seed: "missing" if seed else "done", seeds=(0, 1)
    )
    store, driver = record.write(tmp_path / "runs"), ExitStack()
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
    watch = ["report", "made", "--watch", "--sections", "answer"]
    assert main(watch) == 0
    assert capsys.readouterr().out.splitlines() == [
        "12:00:00  made: 2 done, 2 missing  reports/made/report.html",
        "12:00:00  made: 3 done, 1 missing  reports/made/report.html",
        "12:00:00  made: 3 done, 1 failed  reports/made/report.html",
    ]
    assert "1 failed" in (tmp_path / "reports/made/report.md").read_text()
    (store.trial_directory(record.trial(mqa, 1)) / "result.json").unlink()
    assert main(watch) == 0
    out = capsys.readouterr().out
    assert out.endswith("no driver runs made; `kvlab submit` goes on with what is missing\n")


@pytest.mark.usefixtures("store")
def test_sync_twice_and_to_a_server_that_is_not_there(capsys, monkeypatch):
    assert main(["sync", "--json"]) == 0
    (first,) = json.loads(capsys.readouterr().out)
    counts = {"written": 8, "unchanged": 0, "deleted": 0, "models": 0}
    assert first == {"sweep": "made", "experiment": "1", **counts}
    assert main(["sync", "made"]) == 0
    assert capsys.readouterr().out == "made: 0 written, 8 unchanged, 0 deleted\n"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert main(["sync", "--tracking-uri", "http://127.0.0.1:9"]) == 1
    message = capsys.readouterr().err
    assert (message.count("\n"), "--tracking-uri" in message) == (1, True)


@pytest.mark.usefixtures("store")
def test_ui_refuses_a_port_that_is_taken(capsys):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for words in (["ui"], ["ui", "--live"]):
            assert main([*words, "--port", str(port)]) == 2
            assert f"--port = {port} cannot be used" in capsys.readouterr().err


def test_reports_need_neither_torch_nor_ray_nor_mlflow(tmp_path):
    Record(factors=SMALL, seeds=(0, 1)).write(tmp_path / "runs")
    code = (
        "import sys; from kvlab.cli.main import main; main(['report', 'made']);"
        "print(sorted({'torch', 'ray', 'mlflow', 'optuna', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


SEEDS = (0, 1, 2, 3)
NAMES = ("heads", "position", "sharing")
RECORD = ServedRecord(factors={name: FACTORS[name] for name in NAMES}, seeds=SEEDS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return RECORD.write(tmp_path_factory.mktemp("explained") / "runs").path


@pytest.fixture
def explain(runs, capsys):
    def run(*words, code=0, store=runs):
        capsys.readouterr()
        assert main(["explain", "--store", str(store), *words]) == code
        out, err = capsys.readouterr()
        return out or err

    return run


def test_a_cell_has_several_names_and_the_interval_of_the_report(explain, runs):
    (facts,) = json.loads(explain("mqa+rope", "--json"))
    found, study = facts["comparison"], Study.load(Store(runs), "made")
    compared = study.comparisons["mqa", "rope", "none"]
    assert found["interval"] == [compared.low, compared.high]
    assert found["computed"] == pytest.approx(compared.value, abs=1e-12)
    assert (found["verdict"], found["error"]["df"]) == (compared.verdict, compared.estimate.df)
    out = explain("mqa+rope")
    assert explain("position=rope, heads=mqa") == explain("made", "mqa,rope") == out
    assert "no cell or level of made" in explain("mha,mqa", code=2), "two levels of one factor"
    (effect,) = json.loads(explain("heads=mqa", "--json"))[0]["effects"]
    assert effect["computed"] == pytest.approx(effect["value"], abs=1e-12)
    ends = explain("heads=mqa").partition("95% interval = ")[2].partition(", for all levels")[0]
    assert f"| {ends} | **{effect['verdict']}** |" in render_markdown(make_document(study))


def test_a_trial_and_its_damage(tmp_path, capsys):
    store = Store(tmp_path / "runs")
    StubRun(store.path)(tiny_plan(tmp_path).trials[0].trial)
    (trial,) = store.trial_ids()
    weights = store.training_directory(store.result(trial)["training"]) / "final/model.safetensors"
    path = store.sweep_directory("broken") / "sweep.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    command = ["explain", trial[:6], "--store", str(store.path)]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "broken is left out: " in err
    assert f"trial {trial}: done" in out
    assert f"folder    {store.attempt_directory(trial, 1)}" in out
    assert f"{hashlib.sha256(weights.read_bytes()).hexdigest()}  trainings/" in out
    weights.write_bytes(b"other" + weights.read_bytes()[5:])
    assert main(command) == 1
    assert "DAMAGED   trainings/" in capsys.readouterr().out
    result = store.trial_directory(trial) / "result.json"
    result.write_bytes(result.read_bytes()[:-9])
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "cached    no: its result is not what was written" in out
    assert f"DAMAGED   trials/{trial}/result.json: it does not end with its sha256" in out
