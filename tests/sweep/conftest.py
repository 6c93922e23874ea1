"""What most tests of sweeps begin with."""

import pytest

from kvlab.store import Store
from kvlab.sweep.planning.planner import describe_sweep
from tests.support.stub_trials import StubRun, drive, tiny_plan


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


@pytest.fixture
def planned(tmp_path):
    """A plan of eight stub trials, four of which train."""
    return tiny_plan(tmp_path)


@pytest.fixture
def driven(store, planned):
    """The store, in which the plan was driven to its end."""
    description = describe_sweep(planned, yaml="", experiment_yaml="", command="")
    drive(planned, store, StubRun(store.path), description=description)
    return store
