"""What `kvlab submit` shows: redrawn on a terminal, plain lines in a pipe."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from kvlab.cli.main import main
from tests.support.pty_process import PtyProcess, render_screen
from tests.support.tiny_sweep import ENDLESS_EXPERIMENT, EXPERIMENT, SWEEP, write_tiny_sweep

ROOT = Path(__file__).parent.parent.parent
SCREEN = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
from kvlab.cli.live_screen import LiveScreen
screen = LiveScreen(sys.stdout)
screen.print_line("a line [bold]with[/bold] :smile: that is longer than forty columns")
screen.redraw(["trial a: " + "x" * 60, "trial b"], "sum: 0/2")
screen.print_line("trial b is done")
screen.redraw([f"trial {number}" for number in range(30)], "sum: 1/2")
signal.sigwait([signal.SIGUSR1])
screen.clear()
screen.print_line("done")
"""
SUBMIT = """
import sys
from functools import partial
from kvlab.cli.commands import submit
from kvlab.cli.main import main
from kvlab.trial.run import run_task
from tests.support.stub_trials import StubTrainable
stages = partial(StubTrainable, flag="", seconds=0.01)
submit.run_task = lambda *task, capture_output, **how: run_task(*task, **how, make_trainable=stages)
sys.exit(main(sys.argv[1:]))
"""
"""`kvlab` with stub trials, which need no torch: importing it takes seconds."""


def test_lines_that_stay_stand_above_those_that_are_redrawn():
    process = PtyProcess("-c", SCREEN, rows=10, columns=40, PYTHONPATH=str(ROOT))
    process.read_until(lambda output: "sum: 1/2" in output)
    shown = render_screen(process.output)
    assert shown[:2] == [
        "a line [bold]with[/bold] :smile: that is longer than forty columns",
        "trial b is done",
    ]
    assert shown[2:] == [*(f"trial {number}" for number in range(6)), "... and 24 more", "sum: 1/2"]
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait() == 0
    assert render_screen(process.output)[2:] == ["done"]


@pytest.fixture
def words(tmp_path, monkeypatch, mlflow_template):
    """Submit, in this folder, a sweep whose trainings do not end."""
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    path = write_tiny_sweep(tmp_path, SWEEP, ENDLESS_EXPERIMENT)
    (tmp_path / "runs").mkdir()
    shutil.copyfile(mlflow_template(), tmp_path / "runs" / "mlflow.db")
    store = ["--store", str(tmp_path / "runs"), "--no-report"]
    return ["submit", str(path), "--executor", "inline", "--no-smoke", *store]


def shows_a_running_trial(output):
    """Return whether a whole frame is shown: a trial in training, the summary below it."""
    *_, trial, summary = ["", "", *render_screen(output)]
    is_trial = "heads=" in trial and "training  " in trial
    return is_trial and summary.startswith("s: 0/2 done, ")


def test_an_interrupted_terminal_shows_what_stays_and_its_cursor(words):
    process = PtyProcess("-c", SUBMIT, *words, PYTHONPATH=str(ROOT))
    process.read_until(shows_a_running_trial)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    shown = render_screen(process.output)
    assert not any(line.startswith("s: 0/2 done") for line in shown)
    assert any(line.startswith("stopped ") for line in shown)
    assert shown[-1] == "stopped; submit again to go on from the last checkpoints"
    assert "\x1b[?25l" not in process.output, "a killed process could not show the cursor again"


def test_a_pipe_gets_plain_lines_without_importing_rich(words, tmp_path, monkeypatch, capfd):
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    for name in ("rich", "kvlab.cli.live_screen"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an error
    assert main(words) == 0
    output = capfd.readouterr().out
    assert "2 done, 0 failed" in output
    assert "\x1b" not in output
    assert "\r" not in output
