"""The command that is run when a sweep has ended."""

import json
import os
import time
from argparse import Namespace
from collections import Counter

import pytest

from kvlab.cli.sweep_publishers import collect_outcome, tell_end
from kvlab.errors import StoreError, UsageError
from kvlab.extensions.notify.publisher import NotifyPublisher, run_notify_command
from kvlab.store import Store
from kvlab.sweep import Summary

FACTS = {"sweep": "s", "store": "runs", "outcome": "done", "exit_code": 0}
SAVE = 'cat > notice.json; echo "$KVLAB_SWEEP $KVLAB_OUTCOME $KVLAB_EXIT_CODE $KVLAB_STORE" > env'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def notify_at_end(folder, facts):
    options = Namespace(notify=SAVE)
    publisher = NotifyPublisher(options, Store(folder / "runs"), "s", print)
    facts |= {"sweep": "s", "store": str(folder / "runs")}
    return tell_end([publisher], facts)


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
    with notify_at_end(folder, notice := {}):
        notice |= collect_outcome(summary, 1.5)
    facts, environment = read_notice(folder)
    assert (facts["outcome"], facts["exit_code"]) == (outcome, code)
    assert facts["states"] == dict(summary.states)
    assert (facts["halted"], facts["seconds"]) == (summary.halt_reason or None, 1.5)
    assert environment == ["s", outcome, str(code), str(folder / "runs")]


def test_an_error_is_reported_and_raised_again_unless_the_sweep_never_began(folder):
    with pytest.raises(UsageError), notify_at_end(folder, {}):
        raise UsageError("another driver runs it")
    assert os.listdir(folder) == []
    with pytest.raises(StoreError), notify_at_end(folder, {}):
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
