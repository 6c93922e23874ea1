"""The `kvlab` command, its table of commands."""

import os
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

from kvlab.cli.commands import COMMANDS
from kvlab.cli.main import main
from kvlab.cli.shared_arguments import default_store, find_sweep_file, project_path, read_sweep
from kvlab.errors import SpecError, UsageError
from kvlab.store import Store
from tests.support.record_factory import Record
from tests.support.stub_looks import KnownRun
from tests.support.tiny_sweep import (
    EXPERIMENT,
    SHORT_REPORT,
    SWEEP,
    tiny_sweep_folder,
    write_tiny_sweep,
)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from kvlab.cli.main import main; from kvlab.cli.commands import COMMANDS\n"
        "for command in ['', *COMMANDS]:\n"
        "    try: main([*command.split(), '--help'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "    heavy = {'torch', 'ray', 'mlflow', 'optuna', 'scipy', 'matplotlib', 'transformers'}\n"
        "    assert not heavy & set(sys.modules), (command, heavy & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage: kvlab") == len(COMMANDS) + 1


@pytest.mark.parametrize("command", ["plan s.yaml --rate 1e9", "report made"])
def test_plans_and_reports_need_no_torch(tmp_path, command):
    write_tiny_sweep(tmp_path)
    Record(factors={"heads": ("mha", "mqa")}, seeds=(0, 1)).write(tmp_path / "runs")
    code = (
        f"import sys; from kvlab.cli.main import main; code = main({command.split()});"
        "heavy = {'torch', 'ray', 'mlflow', 'optuna', 'pandas', 'transformers'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]"), done.stderr


def test_a_project_is_found_from_any_folder_below_it(tmp_path, monkeypatch):
    for folder in ("sweeps", "experiments", "notes/deep"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sweeps" / "heads.yaml").write_text("question: q\n")
    (tmp_path / "sweeps" / "other.yaml").write_text("question: q\nname: wide\n")
    monkeypatch.chdir(tmp_path / "notes" / "deep")
    assert (default_store(), project_path("reports")) == ("../../runs", "../../reports")
    assert find_sweep_file("heads") == "../../sweeps/heads.yaml"
    assert find_sweep_file("wide") == "../../sweeps/other.yaml"
    with pytest.raises(UsageError, match=r"sweep = haeds is neither .* did you mean heads\?"):
        find_sweep_file("haeds")
    monkeypatch.chdir(tmp_path.parent)
    assert default_store() == "runs"


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
    assert [store.status(trial) for trial in store.trial_ids()] == ["done", "done"]
    assert (folder / "reports" / "s" / "report.md").exists()


def test_nothing_is_decided_by_what_no_cell_measures(tmp_path):
    one_shot = EXPERIMENT.replace("loss_tokens: 64", "loss_tokens: 64, served: false")
    path = write_tiny_sweep(tmp_path, SWEEP + "decide: {metric: loss_served}\n", one_shot)
    with pytest.raises(SpecError, match=r":7:18: decide.metric = loss_served is measured through"):
        read_sweep(path)
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    assert read_sweep(path).decide.metric == "loss_served"
