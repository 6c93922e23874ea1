"""A machine joins the cluster while a driver runs, with real raylets."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvlab.sweep.executors import make_executor
from tests.contracts.executor_contract import Scripted, some_trial, until_ended, wait_for
from tests.support.ray_head import ROOT


@pytest.mark.faults
def test_a_machine_that_joins_is_used():
    # in a process of its own: Ray keeps for good how the first cluster wanted its token
    module = "tests.sweep.executors.test_growth"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short, for Ray's sockets
        subprocess.run([sys.executable, "-m", module, folder], cwd=ROOT, check=True, timeout=250)


def grow(folder):
    from tests.support.chaos_processes import TwoNodes, set_environment

    class Growing(TwoNodes):
        """A cluster whose second node joins later."""

        def _add(self):
            return None

        def grow(self):
            self._second = TwoNodes._add(self)

    set_environment(folder)
    run, cluster = Scripted(folder), Growing()
    executor = make_executor("ray", run, cluster.address)
    try:
        assert executor.describe() == f"Ray at {cluster.address}, 1 CPUs"
        one, two = some_trial(1), some_trial(2)
        resources = two.experiment.resources
        executor.start(run.ask(one, "meet", other=two.id))
        assert not executor.has_room(resources)
        cluster.grow()
        wait_for(lambda: executor.has_room(resources))
        executor.start(run.ask(two, "meet", other=one.id))  # both end only if both run at once
        assert {ended.outcome for ended in until_ended(executor, 2).values()} == {"done"}
        assert executor.describe() == f"Ray at {cluster.address}, 2 CPUs"
    finally:
        executor.close(force=True)
        cluster.close()


if __name__ == "__main__":
    grow(Path(sys.argv[1]))
