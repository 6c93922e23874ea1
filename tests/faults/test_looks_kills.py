"""Drivers of a sweep with looks are killed at every look, and several share one sweep."""

import pytest

from kvlab.store import Store
from tests.support.driver_process import (
    count_logged_steps,
    finish_driver,
    read_logged_steps,
    start_driver,
    wait_for,
)
from tests.support.stub_looks import drive_looks, load_looks, read_decisions

STEPS_PER_TRIAL = 20
TRIALS_BY_LOOK = (9, 15, 19)


@pytest.fixture
def calm_decisions(tmp_path):
    """Return the seeds and the looks of an undisturbed run of the sweep in ``tmp_path``."""
    store = Store(tmp_path / "calm")
    drive_looks(load_looks(tmp_path), store)
    assert len(read_decisions(store)[1]) == len(TRIALS_BY_LOOK)
    return read_decisions(store)


def test_two_drivers_share_every_look(tmp_path, calm_decisions):
    store = Store(tmp_path / "runs")
    drivers = [start_driver(tmp_path, "--known-loss", "--seconds", 0.005) for _ in range(2)]
    facts = [finish_driver(driver) for driver in drivers]
    assert [one["exit"] for one in facts] == [0, 0]
    assert sum(one["ran"] for one in facts) == TRIALS_BY_LOOK[-1]
    assert read_decisions(store) == calm_decisions


@pytest.mark.faults
@pytest.mark.parametrize("share", [0.2, 0.9])
def test_a_driver_killed_at_every_look_decides_the_same(tmp_path, calm_decisions, share):
    store = Store(tmp_path / "runs")
    started = 0
    for trials in TRIALS_BY_LOOK:
        moment = int((started + share * (trials - started)) * STEPS_PER_TRIAL)
        driver = start_driver(tmp_path, "--known-loss", "--seconds", 0.005)
        wait_for(lambda moment=moment: count_logged_steps(store) >= moment)
        assert driver.poll() is None
        driver.kill()
        driver.communicate()
        started = trials
    assert finish_driver(start_driver(tmp_path, "--known-loss"))["exit"] == 0
    assert read_decisions(store) == calm_decisions
    assert all(steps == sorted(set(steps)) for steps in read_logged_steps(store).values())
    assert finish_driver(start_driver(tmp_path, "--known-loss"))["ran"] == 0


@pytest.mark.faults
def test_drivers_that_join_and_die_at_any_time_decide_the_same(tmp_path, calm_decisions):
    store = Store(tmp_path / "runs")
    for moment in (60, 150, 230, 330):
        pair = [start_driver(tmp_path, "--known-loss", "--seconds", 0.01) for _ in range(2)]
        wait_for(lambda moment=moment: count_logged_steps(store) >= moment)
        for driver in pair:
            driver.kill()
            driver.communicate()
    assert finish_driver(start_driver(tmp_path, "--known-loss"))["exit"] == 0
    assert read_decisions(store) == calm_decisions
