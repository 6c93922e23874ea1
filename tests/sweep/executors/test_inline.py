"""The inline executor."""

import pytest

from kvlab.sweep.executors import make_executor
from tests.contracts.executor_contract import ExecutorContract, Scripted, some_trial


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
