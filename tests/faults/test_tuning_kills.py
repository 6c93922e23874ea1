"""Drivers of a sweep that tunes its rate are killed in every round, and several share one sweep."""

import pytest

from kvlab.store import Store
from tests.support.driver_process import (
    count_logged_steps,
    finish_driver,
    read_logged_steps,
    start_driver,
    wait_for,
)
from tests.support.stub_trials import write_sweep
from tests.support.stub_tuning import TUNED

STEPS_PER_TRIAL = 20
TRAININGS = (12, 14, 16, 20)
"""In all, after every round of the tuning and after the design."""


def read_rates(store):
    """Return what was found, and the trials of the design that have it."""
    sweep = store.sweep("s")
    return sweep["tuning"], sweep["cells"]


@pytest.fixture(scope="module")
def calm_rates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm")
    write_sweep(folder, TUNED)
    assert finish_driver(start_driver(folder, "--surfaces"))["exit"] == 0
    return read_rates(Store(folder / "runs"))


def kill_drivers(folder, moment, count=1):
    """Start drivers, and kill them once this many steps have been made in all."""
    store = Store(folder / "runs")
    drivers = [start_driver(folder, "--surfaces", "--seconds", 0.005) for _ in range(count)]
    wait_for(lambda: count_logged_steps(store) >= moment)
    for driver in drivers:
        driver.kill()
        driver.communicate()


@pytest.mark.faults
@pytest.mark.parametrize("share", [0.2, 0.9])
def test_a_driver_killed_in_every_round_finds_the_same_rates(tmp_path, calm_rates, share):
    store, started = Store(tmp_path / "runs"), 0
    write_sweep(tmp_path, TUNED)
    for trainings in TRAININGS:
        kill_drivers(tmp_path, int((started + share * (trainings - started)) * STEPS_PER_TRIAL))
        started = trainings
    assert finish_driver(start_driver(tmp_path, "--surfaces"))["exit"] == 0
    assert read_rates(store) == calm_rates
    assert all(steps == sorted(set(steps)) for steps in read_logged_steps(store).values())
    assert finish_driver(start_driver(tmp_path, "--surfaces"))["ran"] == 0


@pytest.mark.faults
def test_drivers_that_share_the_rounds_and_die_find_the_same_rates(tmp_path, calm_rates):
    write_sweep(tmp_path, TUNED)
    for moment in (60, 200, 270, 310):
        kill_drivers(tmp_path, moment, count=2)
    pair = [start_driver(tmp_path, "--surfaces", "--seconds", 0.005) for _ in range(2)]
    assert [finish_driver(driver)["exit"] for driver in pair] == [0, 0]
    assert read_rates(Store(tmp_path / "runs")) == calm_rates
