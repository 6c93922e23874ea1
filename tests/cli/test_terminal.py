"""`kvlab submit` whose reader goes away: the sweep and its exit code stay what they are."""

import subprocess
import sys
from pathlib import Path

from kvlab.cli.terminal import tolerate_broken_output
from kvlab.store import Store
from tests.support.tiny_sweep import SWEEP, write_tiny

ROOT = Path(__file__).parent.parent.parent
# One level of three fails, so that the exit code is neither that of success nor of a crash.
FAILING = SWEEP + "    greedy: {evaluation.loss_tokens: 10e6}\n"


def test_a_closed_pipe_does_not_end_the_sweep(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    file = write_tiny(tmp_path, FAILING)
    command = [sys.executable, "-m", "kvlab.cli.main", "submit", str(file), "--executor", "inline"]
    options = ["--store", str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]
    process = subprocess.Popen(
        [*command, *options, "--tracking-uri", "http://127.0.0.1:9"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "3 trials" in process.stdout.readline()
    process.stdout.close()  # as `head -1` does
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 1
    assert error == ""
    store = Store(tmp_path / "runs")
    states = sorted(store.status(trial) for trial in store.trial_ids())
    assert states == ["done", "done", "failed"]
    assert (tmp_path / "reports" / "s" / "report.md").exists()


def test_output_that_is_read_passes(capsys):
    with tolerate_broken_output():
        print("to one")
        print("to the other", file=sys.stderr)
    assert capsys.readouterr() == ("to one\n", "to the other\n")
