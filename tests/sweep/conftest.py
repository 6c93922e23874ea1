"""What most tests of sweeps begin with."""

import pytest

from kvlab.store import Store
from tests.support.stub_trials import tiny_plan


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


@pytest.fixture
def planned(tmp_path):
    """A plan of eight stub trials, four of which train."""
    return tiny_plan(tmp_path)
