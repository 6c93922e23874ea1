"""An executor is a class and a line of the table: the command line takes it from there."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.sweep.executors import EXECUTORS, ExecutorEntry, make_executor
from kvlab.sweep.executors.inline import InlineExecutor
from tests.contracts.executor_contract import ExecutorContract, Scripted
from tests.support.tiny_sweep import run_kvlab, tiny_sweep_folder


class ToyExecutor(InlineExecutor):
    def describe(self):
        return "a toy"


@pytest.fixture
def toy(monkeypatch):
    entry = ExecutorEntry("as inline", lambda run, _: ToyExecutor(run), runs_in_process=True)
    monkeypatch.setitem(EXECUTORS, "toy", entry)
    return "toy"


def test_an_added_executor_runs_a_sweep_by_its_name_and_is_refused_once_removed(
    tmp_path, toy, monkeypatch, capsys
):
    submit = ["submit", "s.yaml", "--executor", toy, "--no-report"]
    with tiny_sweep_folder(tmp_path):
        code, out, error = run_kvlab(*submit)
        assert code == 0, error
        assert "2 to run on a toy" in out
        record = json.loads((tmp_path / "runs" / "sweeps" / "s" / "sweep.json").read_text())
        assert record["command"].endswith("--executor toy")
        code, _, error = run_kvlab(*submit, "--address", "auto")
        assert (code, "needs --executor ray" in error) == (2, True)
        monkeypatch.delitem(EXECUTORS, toy)
        with pytest.raises(SystemExit):
            main(submit)
        assert "invalid choice: 'toy' (choose from 'ray', 'inline')" in capsys.readouterr().err


class TestToy(ExecutorContract):
    @pytest.fixture
    def run(self, tmp_path):
        return Scripted(tmp_path)

    @pytest.fixture
    def executor(self, toy, run):
        return make_executor(toy, run)
