"""Beside a running sweep: MLflow follows it; at its end a command is run."""

import json
import os
import time
from collections import Counter

import pytest
from mlflow import MlflowClient

from kvlab.cli.sweep_callbacks import (
    MLflowCallback,
    collect_outcome,
    notify_at_end,
    run_notify_command,
)
from kvlab.errors import StoreError, UsageError
from kvlab.sweep import Summary
from tests.support.record_factory import Record


def runs(store):
    """Trial ids of the runs in MLflow, and the status of their parent."""
    client = MlflowClient(f"sqlite:///{store.path}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("made").experiment_id])
    trials = sorted(run.data.tags["kvlab.trial"] for run in found if "kvlab.trial" in run.data.tags)
    return trials, [run.info.status for run in found if "kvlab.trial" not in run.data.tags]


def test_mlflow_shows_results_while_the_sweep_runs_and_a_stopped_one_as_killed(tmp_path):
    store = Record(factors={"heads": ("mha", "mqa")}, seeds=(0, 1)).write(tmp_path / "runs")
    trials, warned = store.sweep_trials("made"), []
    later = {trial: store.trial_directory(trial) / "result.json" for trial in trials[1:]}
    hidden = {path: path.read_bytes() for path in later.values()}
    for path in hidden:
        path.unlink()
    mirror = MLflowCallback(store, "made", None, warned.append)
    with store.driver_lock("made").hold():
        mirror.on_result(trials[0])
        assert runs(store) == (trials[:1], ["RUNNING"])
    mirror.finish(None)
    assert runs(store) == (trials[:1], ["KILLED"])
    with store.driver_lock("made").hold():
        for number, (trial, path) in enumerate(later.items(), 2):
            path.write_bytes(hidden[path])
            mirror.on_result(trial)
            assert runs(store)[0] == sorted(trials[:number])
    assert mirror.finish(None) == {"uri": f"sqlite:///{store.path}/mlflow.db", "error": None}
    assert (*runs(store), warned) == (sorted(trials), ["FINISHED"], [])


FACTS = {"sweep": "s", "store": "runs", "outcome": "done", "exit_code": 0}
SAVE = 'cat > notice.json; echo "$KVLAB_SWEEP $KVLAB_OUTCOME $KVLAB_EXIT_CODE $KVLAB_STORE" > env'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_notice(folder):
    return json.loads((folder / "notice.json").read_text()), (folder / "env").read_text().split()


@pytest.mark.parametrize(
    ("summary", "outcome", "code"),
    [
        (Summary(Counter(done=3, pruned=1)), "done", 0),
        (Summary(Counter(done=3, failed=1)), "failed", 1),
        (Summary(Counter(done=3, missing=1), stopped=True), "stopped", 130),
        (Summary(Counter(failed=3, missing=9), halt_reason="the same error"), "halted", 1),
        (Summary(Counter(done=3), stopped=True), "done", 0),  # asked to, and nothing was left
    ],
)
def test_every_outcome_is_reported_with_its_counts(folder, summary, outcome, code):
    with notify_at_end(SAVE, "s", folder / "runs", print) as notice:
        notice |= collect_outcome(summary, 1.5)
    facts, environment = read_notice(folder)
    assert (facts["outcome"], facts["exit_code"]) == (outcome, code)
    assert facts["states"] == dict(summary.states)
    assert (facts["halted"], facts["seconds"]) == (summary.halt_reason or None, 1.5)
    assert environment == ["s", outcome, str(code), str(folder / "runs")]


def test_an_error_is_reported_and_raised_again_unless_the_sweep_never_began(folder):
    with pytest.raises(UsageError), notify_at_end(SAVE, "s", folder, print):
        raise UsageError("another driver runs it")
    assert os.listdir(folder) == []
    with pytest.raises(StoreError), notify_at_end(SAVE, "s", folder, print):
        raise StoreError("the disk is full; free it")
    facts, environment = read_notice(folder)
    assert (facts["outcome"], facts["error"]) == ("error", "the disk is full; free it")
    assert environment[1:3] == ["error", "1"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo line; echo no such channel >&2; exit 3", "exit code 3: no such channel (`echo"),
        ("kill -9 $$", "exit code -9"),
    ],
)
def test_a_failing_command_costs_one_warning(command, expected):
    warnings = []
    run_notify_command(command, FACTS, warnings.append)
    assert len(warnings) == 1
    assert expected in warnings[0]


def is_gone(pid):
    """Whether a process has ended, or waits to be collected."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_hanging_command_is_killed_with_its_children_and_a_background_one_not_awaited(folder):
    warnings, command = [], "(sleep 60; touch late) & echo $! > child; wait"
    run_notify_command(command, FACTS, warnings.append, timeout=1.0)
    assert warnings == [f"the notification was ended after 1 s: `{command}`"]
    deadline = time.monotonic() + 10
    while not is_gone(int((folder / "child").read_text())):
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.1)
    run_notify_command("sleep 20 & echo $! > child", FACTS, warnings.append, timeout=10.0)
    assert len(warnings) == 1
    os.kill(int((folder / "child").read_text()), 9)
