"""The command that is run when a sweep has ended."""

import json
import os
import time
from collections import Counter

import pytest

from kvlab.cli.sweep_callbacks import collect_outcome, notify_at_end, run_notify_command
from kvlab.errors import StoreError, UsageError
from kvlab.sweep import Summary

FACTS = {"sweep": "s", "store": "runs", "outcome": "done", "exit_code": 0}
SAVE = 'cat > notice.json; echo "$KVLAB_SWEEP $KVLAB_OUTCOME $KVLAB_EXIT_CODE $KVLAB_STORE" > env'


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read_notice(tmp_path):
    return json.loads((tmp_path / "notice.json").read_text()), (
        tmp_path / "env"
    ).read_text().split()


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
def test_every_outcome_is_reported_with_its_counts(tmp_path, summary, outcome, code):
    with notify_at_end(SAVE, "s", tmp_path / "runs", print) as notice:
        notice |= collect_outcome(summary, 12.3456)
    facts, environment = read_notice(tmp_path)
    assert (facts["outcome"], facts["exit_code"]) == (outcome, code)
    assert facts["states"] == dict(summary.states)
    assert facts["halted"] == (summary.halt_reason or None)
    assert environment == ["s", outcome, str(code), str(tmp_path / "runs")]


def test_an_error_is_reported_and_raised_again(tmp_path):
    with (
        pytest.raises(StoreError, match="disk"),
        notify_at_end(SAVE, "s", tmp_path / "runs", print),
    ):
        raise StoreError("the disk is full; free it")
    facts, environment = read_notice(tmp_path)
    assert (facts["outcome"], facts["error"]) == ("error", "the disk is full; free it")
    assert environment[1:3] == ["error", "1"]


def test_a_sweep_that_never_began_is_not_reported(tmp_path):
    with pytest.raises(UsageError), notify_at_end(SAVE, "s", tmp_path / "runs", print):
        raise UsageError("another driver runs it")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo line; echo no such channel >&2; exit 3", "exit code 3: no such channel (`echo"),
        ("no-such-command-at-all", "exit code 127"),
        ("kill -9 $$", "exit code -9"),
    ],
)
def test_a_failing_command_costs_one_warning(command, expected):
    warnings = []
    run_notify_command(command, FACTS, warnings.append)
    assert len(warnings) == 1
    assert expected in warnings[0]


def test_a_hanging_command_is_killed_with_its_children(tmp_path):
    warnings = []
    run_notify_command(
        "(sleep 60; touch late) & echo $! > child; wait", FACTS, warnings.append, timeout=1.0
    )
    assert warnings == [
        "the notification was ended after 1 s: `(sleep 60; touch late) & echo $! > child; wait`"
    ]
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # it is gone, or waits to be collected
        try:
            with open(f"/proc/{child}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    break
        except FileNotFoundError:
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the child lives on")


def test_a_background_process_of_the_command_is_not_waited_for(tmp_path):
    warnings = []
    run_notify_command("sleep 20 & echo $! > child", FACTS, warnings.append, timeout=10.0)
    assert warnings == []
    os.kill(int((tmp_path / "child").read_text()), 9)
