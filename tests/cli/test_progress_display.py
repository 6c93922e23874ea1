"""What `kvlab submit` shows: redrawn on a terminal, plain lines in a pipe."""

import os
import signal
import sys
from functools import partial

import pytest

from kvlab.cli.commands import submit
from kvlab.cli.main import main
from kvlab.cli.terminal import LiveScreen
from kvlab.trial.run import run_task
from tests.support.stub_trials import StubTrainable
from tests.support.terminal import Terminal, render_screen
from tests.support.tiny_sweep import ENDLESS_EXPERIMENT, EXPERIMENT, SWEEP, tiny_sweep_folder


@pytest.fixture
def terminal(monkeypatch):
    for name, value in {"TERM": "xterm", "LINES": "10", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    return Terminal()


def test_lines_that_stay_stand_above_those_that_are_redrawn(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    screen = LiveScreen(terminal)
    screen.print_line("a line [bold]with[/bold] :smile: that is longer than forty columns")
    screen.redraw(["trial a: " + "x" * 60, "trial b"], "sum: 0/2")
    assert render_screen(terminal.getvalue())[1:] == [f"trial a: {'x' * 30}", "trial b", "sum: 0/2"]
    screen.print_line("trial b is done")
    screen.redraw([f"trial {number}" for number in range(30)], "sum: 1/2")
    *stay, last = render_screen(terminal.getvalue())
    assert stay[:2] == [
        "a line [bold]with[/bold] :smile: that is longer than forty columns",
        "trial b is done",
    ]
    assert stay[2:] == [*(f"trial {number}" for number in range(6)), "... and 24 more"]
    assert last == "sum: 1/2"
    screen.clear()
    screen.print_line("done")
    assert render_screen(terminal.getvalue())[2:] == ["done"]


@pytest.fixture
def words(tmp_path):
    """Submit, in this folder, a sweep whose trainings do not end."""
    with tiny_sweep_folder(tmp_path, SWEEP, ENDLESS_EXPERIMENT):
        yield ["submit", "s.yaml", "--executor", "inline", "--no-smoke", "--no-report"]


def stub_trials(monkeypatch, kind, **options):
    """Let trials do what a stub does; their output is captured into no file."""

    def run_stub(*task, capture_output, **how):  # noqa: ARG001
        return run_task(*task, **how, make_trainable=partial(kind, flag="", **options))

    monkeypatch.setattr(submit, "run_task", run_stub)


class Interrupted(StubTrainable):
    """Ctrl-C is pressed when a frame is shown: a trial in training, the summary below it."""

    def act(self, kind, step):  # noqa: ARG002
        *_, trial, summary = ["", "", *render_screen(sys.stdout.getvalue())]
        is_trial = "heads=" in trial and "training  " in trial
        if is_trial and summary.startswith("s: 0/2 done, "):
            os.kill(os.getpid(), signal.SIGINT)
            self.act = lambda *_: None  # once


def test_an_interrupted_terminal_shows_what_stays_and_its_cursor(words, terminal, monkeypatch):
    stub_trials(monkeypatch, Interrupted, seconds=0.01)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(words) == 130
    shown = render_screen(terminal.getvalue())
    assert not any(line.startswith("s: 0/2 done") for line in shown)
    assert any(line.startswith("stopped ") for line in shown)
    assert shown[-1] == "stopped; submit again to go on from the last checkpoints"
    hides_cursor = "\x1b[?25l" in terminal.getvalue()
    assert not hides_cursor, "a killed process could not show the cursor again"


def test_a_pipe_gets_plain_lines(words, tmp_path, monkeypatch, capfd):
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    stub_trials(monkeypatch, StubTrainable)
    assert main(words) == 0
    output = capfd.readouterr().out
    assert "2 done, 0 failed" in output
    assert "\x1b" not in output
    assert "\r" not in output
