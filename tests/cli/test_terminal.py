"""Tables, exact sizes, and output that nobody reads any more."""

import os
from contextlib import redirect_stdout

from kvlab.cli.main import main
from kvlab.cli.terminal import format_exact_bytes, format_table
from kvlab.store import Store
from tests.support.stub_looks import KnownRun
from tests.support.tiny_sweep import SHORT_REPORT, SWEEP, tiny_sweep_folder


def test_a_closed_pipe_does_not_end_the_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "kvlab.cli.commands.submit.run_task", lambda task, store, **_: KnownRun(store)(task)
    )
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does in the end
    with (
        tiny_sweep_folder(tmp_path, SWEEP + SHORT_REPORT) as folder,
        open(writer, "w") as unread,
        redirect_stdout(unread),
    ):
        assert main(["submit", "s.yaml", "--executor", "inline"]) == 0
    store = Store(folder / "runs")
    states = sorted(store.status(trial) for trial in store.trial_ids())
    assert states == ["done", "done"]
    assert (folder / "reports" / "s" / "report.md").exists()


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
