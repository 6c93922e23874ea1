"""`kvlab submit` and what is asked about it afterwards, on a real sweep of a tiny model."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from mlflow import MlflowClient

from kvlab.errors import StoreError
from kvlab.store import Store
from tests.support.tiny_sweep import EXPERIMENT, SWEEP, call, tiny_place

# One level of three fails: there is not that much held-out text. It shares a training.
FAILING = SWEEP + "    greedy: {evaluation.loss_tokens: 10e6}\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a sweep to work in, and a data folder beside it."""
    with tiny_place(tmp_path_factory.mktemp("tiny"), FAILING) as folder:
        yield folder


@pytest.fixture(scope="module")
def submitted(place):  # noqa: ARG001
    return call("submit", "s.yaml", "--executor", "inline")


@pytest.fixture(scope="module")
def store(place, submitted):  # noqa: ARG001
    return Store(place / "runs")


def failed(store):
    return next(trial for trial in store.trial_ids() if store.status(trial) == "failed")


def test_a_failing_trial_is_shown_and_the_others_end(submitted, store):
    code, out, error = submitted
    assert (code, error) == (1, "")
    assert "2 done, 1 failed" in out
    assert sorted(store.status(trial) for trial in store.trial_ids()) == ["done", "done", "failed"]
    facts = store.result(failed(store))["error"]
    assert (facts["class"], facts["type"]) == ("data", "DataError")
    shown = next(line for line in out.splitlines() if failed(store) in line)
    assert "data: DataError" in shown
    assert "--retry-failed" in out


def test_the_numbers_of_a_result_agree_with_each_other(store):
    for trial in store.trial_ids():
        result = store.result(trial)
        if result["status"] == "done":
            found = result["measurements"]
            assert found["loss_served"] == pytest.approx(found["loss"], abs=2e-5)
            assert found["serving_gap"] == pytest.approx(found["loss_served"] - found["loss"])
            assert found["kv_bytes_formula"] == found["kv_bytes_storage"]
            assert found["kv_bytes_formula"] == result["kv"]["bytes_at_block_size"]
            assert result["training_record"]["steps"] == 10
            assert [point[0] for point in result["curves"]["validation_loss"]] == [5, 10]


def test_nothing_that_is_kept_names_a_folder_of_this_machine(place, store):
    for path in store.path.rglob("*.json"):
        assert str(place) not in path.read_text(), path


def test_the_report_is_there_and_the_last_line_says_where(place, submitted):
    out = submitted[1]
    assert out.splitlines()[-1] == "reports/s"
    text = (place / "reports" / "s" / "report.md").read_text()
    assert "What does it cost?" in text
    assert "greedy" in text
    assert "<html" in (place / "reports" / "s" / "report.html").read_text()


def test_mlflow_has_a_run_for_each_trial_with_the_report_at_their_parent(store, submitted):  # noqa: ARG001
    client = MlflowClient(f"sqlite:///{store.path}/mlflow.db")
    experiment = client.get_experiment_by_name("s").experiment_id
    runs = client.search_runs([experiment])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert (len(runs), len(parents)) == (4, 1)
    status = sorted(run.info.status for run in runs if run not in parents)
    assert (status, parents[0].info.status) == (["FAILED", "FINISHED", "FINISHED"], "FAILED")
    report = client.list_artifacts(parents[0].info.run_id, "report")
    assert "report/report.md" in {file.path for file in report}


def test_submitted_again_it_runs_nothing(place, store):
    before = {path: path.stat().st_mtime_ns for path in store.path.glob("tr*/*/*.json")}
    report = (place / "reports" / "s" / "report.md").read_bytes()
    code, out, error = call("submit", "s.yaml", "--executor", "inline", "--json")
    facts = json.loads(out)
    assert code == 1, "a failure is still there to be looked at"
    assert facts["states"] == {"done": 2, "failed": 1, "missing": 0}
    assert (facts["report"], facts["mlflow"]["error"]) == ("reports/s", None)
    assert "nothing is missing" in error
    assert {path: path.stat().st_mtime_ns for path in store.path.glob("tr*/*/*.json")} == before
    assert (place / "reports" / "s" / "report.md").read_bytes() == report


def test_plan_tells_how_the_trials_stand(store):
    code, out, _ = call("plan", "s.yaml", "--json")
    facts = json.loads(out)
    assert (code, facts["totals"]["states"]) == (0, {"done": 2, "failed": 1})
    assert (facts["totals"]["trainings"], facts["totals"]["training_tokens_to_do"]) == (2, 0)
    assert sorted(one["trial"] for one in facts["trials"]) == store.trial_ids()
    text = call("plan", "s.yaml")[1]
    assert "3 trials, 2 trainings: 1 trial shares a training with another." in text


def test_plan_of_another_store_is_new():
    out = call("plan", "s.yaml", "--store", "elsewhere", "--json")[1]
    assert json.loads(out)["totals"]["states"] == {"new": 2, "shares training": 1}


def test_status(store):
    code, out, _ = call("status", "s", "--json")
    facts = json.loads(out)
    assert (code, facts["states"], facts["driven"]) == (0, {"done": 2, "failed": 1}, False)
    assert sorted(one["trial"] for one in facts["trials"]) == store.trial_ids()
    assert [one["sweep"] for one in json.loads(call("status", "--json")[1])] == ["s"]
    assert call("status", "s.yaml")[1] == call("status", "s")[1]
    assert failed(store)[:8] in call("status", "s")[1]
    columns = call("status")[1].splitlines()[-1].split()
    assert columns == ["s", "2", "1", "0", "0", "0", "0", "no"]
    with store.trial_lock(failed(store)).hold(), store.driver_lock("s").hold():
        assert json.loads(call("status", "s", "--json")[1])["driven"] is True


def test_logs(store):
    trial = failed(store)
    code, out, _ = call("logs", trial[:6])
    assert code == 0
    assert out.startswith((store.attempt_directory(trial, 1) / "log.txt").read_text())
    assert "Traceback" in out
    facts = json.loads(call("logs", trial, "--attempt", "1", "--json")[1])
    assert (facts["trial"], facts["attempt"]) == (trial, 1)
    assert facts["traceback"].splitlines()[-1].startswith("kvlab.errors.DataError: ")
    assert call("logs", trial, "--follow")[1] == out, "an ended attempt is not waited for"


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["logs", "zz"], "trial = zz is not in"),
        (["logs", "../../x"], "is not in"),
        (["logs", ""], "fits 3 trials"),
        (["status", "nosuch"], "sweep = nosuch is not in the store"),
        (["status", "Up"], "is not a name"),
        (["stop", "s"], "sweep = s is not running"),
        (["stop", "nosuch"], "sweep = nosuch is not in the store"),
        (["submit", "s.yaml", "--executor", "inline", "--address", "auto"], "--address = auto"),
        (["submit", "nosuch.yaml"], "nosuch.yaml"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, text):
    code, out, error = call(*arguments)
    assert (code, out) == (2, "")
    assert text in error
    assert error.count("\n") == 1


def test_no_attempt_of_that_number(store):
    code, _, error = call("logs", failed(store), "--attempt", "7")
    assert (code, error.count("\n")) == (2, 1)
    assert "--attempt = 7" in error


def test_stop_asks_the_driver_that_runs(store):
    with store.driver_lock("s").hold():
        code, out, _ = call("stop", "s", "--json")
        assert (code, json.loads(out)) == (0, {"sweep": "s", "asked_to_stop": True})
        assert store.stop_flag("s").exists()
    store.stop_flag("s").unlink()


def test_a_damaged_result_is_made_again_and_the_same(place, store):
    trial = next(trial for trial in store.trial_ids() if store.status(trial) == "done")
    whole = store.result(trial)["measurements"]["loss"]
    path = store.trial_directory(trial) / "result.json"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(StoreError):
        store.result(trial)
    assert "its result is damaged" in call("status", "s")[1]
    code, out, _ = call("submit", place / "s.yaml", "--executor", "inline", "--no-report")
    assert code == 1
    assert "2 ended before, 1 to run" in out
    assert store.result(trial)["measurements"]["loss"] == whole
    assert store.attempts(trial) == [1, 2]


class Away(BaseHTTPRequestHandler):
    """An MLflow server that is out of order, and counts how often it is asked."""

    asked = 0

    def do_POST(self):
        type(self).asked += 1
        self.send_error(404, "out of order")

    do_GET = do_POST

    def log_message(self, *arguments):
        pass


def test_an_outage_of_mlflow_costs_one_warning_and_asks_no_more(place, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    server = HTTPServer(("127.0.0.1", 0), Away)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        uri = f"http://127.0.0.1:{server.server_port}"
        (place / "good.yaml").write_text(SWEEP + "seeds: [5]\n")
        code, out, error = call(
            "submit", "good.yaml", "--executor", "inline", "--store", "other", "--json",
            "--tracking-uri", uri,
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    facts = json.loads(out)
    assert (code, facts["states"]) == (0, {"done": 2, "missing": 0})
    assert facts["mlflow"]["error"]
    assert (place / facts["report"] / "report.md").exists()
    assert len(re.findall("MLflow", error.replace("MLflow at", ""))) == 1
    assert Away.asked == 4, "a knock and a question while it ran, and at the end"


def test_missing_text_is_told_before_anything_is_written(place):
    (place / "gone.yaml").write_text(EXPERIMENT.replace("texts", "gone"))
    (place / "lost.yaml").write_text(SWEEP.replace("e.yaml", "gone.yaml"))
    code, out, error = call("submit", "lost.yaml", "--store", "never", "--executor", "inline")
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert "gone" in error
    assert not (place / "never").exists()


def test_ctrl_c_stops_at_a_checkpoint_with_130(place):
    (place / "long.yaml").write_text(EXPERIMENT.replace("tokens: 640,", "tokens: 64e9,"))
    (place / "slow.yaml").write_text(SWEEP.replace("e.yaml", "long.yaml"))
    store = Store(place / "slow")
    command = [sys.executable, "-m", "kvlab.cli.main", "submit", "slow.yaml"]
    options = ["--store", "slow", "--executor", "inline", "--json"]
    process = subprocess.Popen([*command, *options], stdout=-1, stderr=-1, text=True)
    deadline = time.monotonic() + 120
    while not any((store.progress(t) or {}).get("step") for t in store.trial_ids()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert json.loads(out)["states"] == {"missing": 2}
    assert "report" not in json.loads(out)
    assert "Traceback" not in error
    assert list((store.path / "trainings").glob("*/checkpoints/step-*"))
    assert "2 missing; no driver is running" in call("status", "slow", "--store", "slow")[1]
