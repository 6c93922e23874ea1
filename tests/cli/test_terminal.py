"""Tables, exact sizes, and output that nobody reads any more."""

import subprocess
import sys
from pathlib import Path

from kvlab.cli.terminal import format_exact_bytes, format_table
from kvlab.store import Store
from tests.support.tiny_sweep import FAILING_SWEEP, SHORT_REPORT, write_tiny_sweep

ROOT = Path(__file__).parent.parent.parent


def test_a_closed_pipe_does_not_end_the_sweep(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    file = write_tiny_sweep(tmp_path, FAILING_SWEEP + SHORT_REPORT)
    command = [sys.executable, "-m", "kvlab.cli.main", "submit", str(file), "--executor", "inline"]
    options = ["--store", str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]
    process = subprocess.Popen(
        [*command, *options, "--tracking-uri", "http://127.0.0.1:9"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "preparing data" in process.stdout.readline()
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


def test_a_table_has_aligned_columns_without_trailing_spaces():
    rows = [["name", "bytes", "state"], ["mqa", "1,024", "new"], ["gqa-4", "96", ""]]
    assert format_table(rows, right="lr").splitlines() == [
        "name   bytes  state",
        "-----  -----  -----",
        "mqa    1,024  new",
        "gqa-4     96",
    ]


def test_an_exact_size_has_both_units():
    assert format_exact_bytes(1_048_576) == "1,048,576 bytes = 1.049 MB = 1.000 MiB"
    assert format_exact_bytes(75_497_472) == "75,497,472 bytes = 75.5 MB = 72.0 MiB"
