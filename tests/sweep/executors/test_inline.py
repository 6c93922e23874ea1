"""The inline executor, and another one that is added by a class and a line of the table."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.sweep.executors import EXECUTORS, ExecutorEntry, make_executor
from kvlab.sweep.executors.inline import InlineExecutor
from tests.contracts.executor_contract import ExecutorContract, Scripted, some_trial
from tests.support.stub_looks import KnownRun
from tests.support.tiny_sweep import run_kvlab, tiny_sweep_folder


class TestInline(ExecutorContract):
    @pytest.fixture
    def run(self, tmp_path):
        return Scripted(tmp_path)

    @pytest.fixture
    def executor(self, run):
        return make_executor("inline", run)

    def test_an_interrupt_is_not_an_end_of_the_trial(self, run):
        def interrupted(_):
            raise KeyboardInterrupt

        executor = make_executor("inline", interrupted)
        executor.start(run.ask(some_trial(1), "done"))
        with pytest.raises(KeyboardInterrupt):
            executor.wait(1.0)
        assert executor.wait(1.0) == []

    def test_closing_forgets_what_has_not_begun(self, run):
        begun = []
        executor = make_executor("inline", begun.append)
        executor.start(run.ask(some_trial(1), "done"))
        executor.close()
        assert executor.wait(1.0) == []
        assert begun == []


class ToyExecutor(InlineExecutor):
    def describe(self):
        return "a toy"


def test_an_added_executor_runs_a_sweep_by_its_name_and_is_refused_once_removed(
    tmp_path, monkeypatch, capsys
):
    entry = ExecutorEntry("as inline", lambda run, _: ToyExecutor(run), runs_in_process=True)
    monkeypatch.setitem(EXECUTORS, "toy", entry)
    monkeypatch.setattr(
        "kvlab.cli.commands.submit.run_task", lambda task, store, **_: KnownRun(store)(task)
    )
    submit = ["submit", "s.yaml", "--executor", "toy", "--no-report"]
    with tiny_sweep_folder(tmp_path):
        code, out, error = run_kvlab(*submit)
        assert code == 0, error
        assert "2 to run on a toy" in out
        record = json.loads((tmp_path / "runs" / "sweeps" / "s" / "sweep.json").read_text())
        assert record["command"].endswith("--executor toy")
        code, _, error = run_kvlab(*submit, "--address", "auto")
        assert (code, "needs --executor ray" in error) == (2, True)
        monkeypatch.delitem(EXECUTORS, "toy")
        with pytest.raises(SystemExit):
            main(submit)
        assert "invalid choice: 'toy' (choose from 'ray', 'inline')" in capsys.readouterr().err
