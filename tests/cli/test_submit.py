"""`kvlab submit` and the commands about it, on a real sweep of a tiny model."""

import json
import re
from argparse import Namespace

import pytest

from kvlab.analysis.study import Study
from kvlab.cli.commands.submit import write_command
from kvlab.report import answer_text
from kvlab.store import Store
from kvlab.sweep.executors import DEFAULT_EXECUTOR
from tests.support.tiny_sweep import EXPERIMENT, FAILING_SWEEP, SWEEP, run_kvlab, tiny_sweep_folder

SUBMIT = ("submit", "s.yaml", "--executor", "inline")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a sweep to work in, and a data folder beside it."""
    with tiny_sweep_folder(
        tmp_path_factory.mktemp("tiny"), FAILING_SWEEP, publishes=True
    ) as folder:
        yield folder


@pytest.fixture(scope="module")
def submitted(folder):  # noqa: ARG001
    return run_kvlab(*SUBMIT)


@pytest.fixture(scope="module")
def store(folder, submitted):  # noqa: ARG001
    return Store(folder / "runs")


@pytest.fixture(scope="module")
def failed(store):
    return next(trial for trial in store.trial_ids() if store.status(trial) == "failed")


def test_a_failing_trial_is_shown_and_the_others_end(submitted, store, failed):
    code, out, error = submitted
    assert (code, error) == (1, "")
    assert re.search(r"^2 done, 1 failed in (\d+m)?\d?\ds$", out, re.MULTILINE)
    assert sorted(store.status(trial) for trial in store.trial_ids()) == ["done", "done", "failed"]
    facts = store.result(failed)["error"]
    assert (facts["class"], facts["type"]) == ("host_memory", "RuntimeError")
    shown = next(line for line in out.splitlines() if failed in line)
    assert "host_memory: RuntimeError" in shown
    assert "--retry-failed" in out


def test_the_numbers_of_a_result_agree_with_each_other_and_name_no_folder(folder, store):
    for result in filter(lambda one: one["status"] == "done", map(store.result, store.trial_ids())):
        found = result["measurements"]
        assert found["loss_served"] == pytest.approx(found["loss"], abs=2e-5)
        assert found["serving_gap"] == pytest.approx(found["loss_served"] - found["loss"])
        assert found["kv_bytes_formula"] == found["kv_bytes_storage"]
        assert found["kv_bytes_formula"] == result["kv"]["bytes_at_block_size"]
        assert result["training_record"]["steps"] == 10
        assert [point[0] for point in result["curves"]["validation_loss"]] == [5, 10]
    for path in store.path.rglob("*.json"):
        assert str(folder) not in path.read_text(), path


def test_the_last_lines_are_the_answer_and_the_path_of_the_report(folder, submitted, store):
    lines = submitted[1].splitlines()
    assert lines[-1] == "reports/s/report.html"
    first = lines.index("failed trials are not run again unless asked: --retry-failed") + 1
    answer = answer_text(Study.load(store, "s"))
    assert "heads=mqa" in answer
    assert "This report is partial. 2 of 3 trials are measured (1 failed)" in answer
    assert " ".join(" ".join(lines[first:-1]).split()) == " ".join(answer.split())
    assert max(map(len, lines[first:-1])) <= 80, "as wide as a terminal that is none"
    text = (folder / "reports" / "s" / "report.md").read_text()
    assert "What does it cost?" in text
    assert "greedy" in text
    assert "<html" in (folder / "reports" / "s" / "report.html").read_text()


@pytest.mark.parametrize(
    ("file", "more"), [("s.yaml", "decide: {margin: 0.5}\n"), ("e.yaml", "# more\n")]
)
def test_a_report_of_a_file_that_has_changed_says_so(folder, store, file, more):
    words = ("report", "s.yaml", "--store", str(store.path), "--reports", "again")
    assert run_kvlab(*words)[::2] == (0, "")
    text = (folder / file).read_text()
    (folder / file).write_text(f"{text}{more}")
    try:
        code, _, error = run_kvlab(*words)
    finally:
        (folder / file).write_text(text)
    assert (code, error.count("\n")) == (0, 1)
    assert error.startswith(f"{file} has changed since it was submitted")


@pytest.mark.parametrize(
    ("file", "expected"),
    [("../s.yaml", "s.yaml"), ("{}/s.yaml", "s.yaml"), ("{}/p/a/s.yaml", "a/s.yaml")],
)
def test_a_command_names_no_folder_of_this_machine(file, expected, tmp_path, monkeypatch):
    (tmp_path / "p").mkdir()
    monkeypatch.chdir(tmp_path / "p")
    options = Namespace(sweep=file.format(tmp_path), scale="small", executor=DEFAULT_EXECUTOR)
    assert write_command(options) == f"kvlab submit {expected} --scale small"


def test_submitting_again_runs_nothing(folder, store):
    before = {path: path.stat().st_mtime_ns for path in store.path.glob("tr*/*/*.json")}
    report = (folder / "reports" / "s" / "report.md").read_bytes()
    code, out, error = run_kvlab(*SUBMIT, "--json")
    facts = json.loads(out)
    assert code == 1, "a failure is still there to be looked at"
    assert facts["states"] == {"done": 2, "failed": 1, "missing": 0}
    assert (facts["report"], facts["mlflow"]["error"]) == ("reports/s", None)
    assert facts["answer"] == answer_text(Study.load(store, "s"))
    assert "nothing is missing" in error
    assert store.sweep("s")["command"] == "kvlab submit s.yaml --executor inline"
    assert {path: path.stat().st_mtime_ns for path in store.path.glob("tr*/*/*.json")} == before
    assert (folder / "reports" / "s" / "report.md").read_bytes() == report


def test_status_and_stop(store):
    assert run_kvlab("status", "s.yaml") == run_kvlab("status", "s")
    assert [one["sweep"] for one in json.loads(run_kvlab("status", "--json")[1])] == ["s"]
    columns = run_kvlab("status")[1].splitlines()[-1].split()
    assert columns == ["s", "2", "1", "0", "0", "0", "0", "no"]
    with store.driver_lock("s").hold():
        assert json.loads(run_kvlab("status", "s", "--json")[1])["driven"] is True
        code, out, _ = run_kvlab("stop", "s", "--json")
        assert (code, json.loads(out)) == (0, {"sweep": "s", "asked_to_stop": True})
        assert store.stop_flag("s").exists()
    store.stop_flag("s").unlink()


def test_logs_of_a_trial_and_of_the_trials_of_a_sweep(store, failed):
    log = (store.attempt_directory(failed, 1) / "log.txt").read_text()
    code, out, _ = run_kvlab("logs", failed[:6])
    assert code == 0
    assert out.startswith(log)
    assert "Traceback" in out
    facts = json.loads(run_kvlab("logs", failed, "--attempt", "1", "--json")[1])
    assert (facts["trial"], facts["attempt"]) == (failed, 1)
    assert facts["traceback"].splitlines()[-1].startswith("RuntimeError: ")
    assert run_kvlab("logs", failed, "--follow")[1] == out, "an ended attempt is not waited for"
    assert run_kvlab("logs", failed, "--attempt", "7")[0] == 2
    code, out, error = run_kvlab("logs", "s")
    assert (code, error) == (0, "")
    assert out.splitlines() == [f"{failed[:8]}  {line}" for line in log.splitlines()]
    running = next(one for one in store.sweep_trials("s") if one != failed)
    with store.trial_lock(running).hold():
        assert {line[:8] for line in run_kvlab("logs", "s", "-f")[1].splitlines()} == {running[:8]}
    facts = json.loads(run_kvlab("logs", "s", "--json")[1])
    assert [one["trial"] for one in facts["trials"]] == [failed]


def test_missing_text_is_reported_before_anything_is_written(folder):
    (folder / "gone.yaml").write_text(EXPERIMENT.replace("texts", "gone"))
    (folder / "lost.yaml").write_text(SWEEP.replace("e.yaml", "gone.yaml"))
    code, out, error = run_kvlab("submit", "lost.yaml", "--store", "never", "--executor", "inline")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert re.match(r"gone\.yaml:3:49: data\.paths\.0 = .*gone does not exist", error)
    assert not (folder / "never").exists()


def test_a_folder_for_mlflow_is_refused_before_anything_runs(folder, monkeypatch):
    """Not after the first trial, which may have trained for hours beside others."""
    submit = ("submit", "s.yaml", "--store", "never", "--executor", "inline")
    code, out, error = run_kvlab(*submit, "--tracking-uri", "mlruns")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("--tracking-uri = mlruns ")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:mlruns")
    code, out, error = run_kvlab(*submit)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("MLFLOW_TRACKING_URI = file:mlruns ")
    assert not (folder / "never").exists()
