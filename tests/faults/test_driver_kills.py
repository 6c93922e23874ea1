"""Drivers in processes of their own are killed, stopped, and started again."""

import json
import os
import signal

import psutil
import pytest

from tests.support.chaos_processes import lives
from tests.support.driver_process import (
    TIMEOUT_SECONDS,
    count_logged_steps,
    finish_driver,
    list_results,
    read_logged_steps,
    start_driver,
    wait_for,
)
from tests.support.stub_trials import read_numbers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_at_a_checkpoint(tmp_path, interrupted_sweep, number):
    planned, store, expected = interrupted_sweep
    driver = start_driver(tmp_path, "--seconds", 0.02)
    wait_for(lambda: count_logged_steps(store) >= 25)
    driver.send_signal(number)
    facts = finish_driver(driver)
    assert facts["exit"] == 130
    assert 0 < facts["states"]["missing"] < 8
    assert not store.stop_flag("s").exists()
    assert finish_driver(start_driver(tmp_path))["exit"] == 0
    assert read_numbers(store, planned) == expected
    assert set(map(tuple, read_logged_steps(store).values())) == {tuple(range(1, 21))}


def test_the_second_signal_ends_it_at_once_and_nothing_is_lost(tmp_path, interrupted_sweep):
    planned, store, expected = interrupted_sweep
    first = planned.trials[0].trial.id
    driver = start_driver(tmp_path, "--script", json.dumps([[0, "train", 5, "hang"]]))
    wait_for(lambda: count_logged_steps(store) == 5)
    driver.send_signal(signal.SIGINT)
    wait_for(lambda: list(store.sweep_directory("s").glob("drivers/*.stop")))
    assert driver.poll() is None
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=TIMEOUT_SECONDS)
    assert driver.returncode != 0
    assert (store.status(first), store.is_driven("s")) == (None, False)
    assert finish_driver(start_driver(tmp_path))["states"]["done"] == 8
    assert read_numbers(store, planned) == expected
    assert set(map(tuple, read_logged_steps(store).values())) == {tuple(range(1, 21))}


@pytest.mark.faults
def test_a_killed_driver_takes_its_cluster_with_it_and_the_next_goes_on(
    tmp_path, interrupted_sweep
):
    planned, store, expected = interrupted_sweep
    driver = start_driver(tmp_path, "--executor", "ray", "--seconds", 0.05)
    wait_for(lambda: count_logged_steps(store) >= 10)
    family = psutil.Process(driver.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in family)
    driver.kill()
    driver.communicate()
    wait_for(lambda: not any(map(lives, family)))
    before, steps = list_results(store, planned), count_logged_steps(store)
    assert steps < 80
    assert all(not store.is_running(one.trial.id) for one in planned.trials)
    again = start_driver(tmp_path, "--executor", "ray", "--seconds", 0.05)
    wait_for(lambda: count_logged_steps(store) >= 30)
    os.killpg(again.pid, signal.SIGINT)  # as Ctrl-C at a terminal: to the workers too
    facts = finish_driver(again)
    assert (facts["exit"], facts["retried"]) == (130, 0)
    assert finish_driver(start_driver(tmp_path))["states"]["done"] == 8
    assert read_numbers(store, planned) == expected
    assert list_results(store, planned).items() >= before.items()
    assert all(done == sorted(set(done)) for done in read_logged_steps(store).values())


@pytest.mark.faults
def test_a_driver_whose_raylet_dies_begins_its_cluster_again(tmp_path, interrupted_sweep):
    planned, store, expected = interrupted_sweep
    driver = start_driver(tmp_path, "--executor", "ray", "--seconds", 0.05)
    wait_for(lambda: count_logged_steps(store) >= 10)
    children = psutil.Process(driver.pid).children()
    [raylet] = [process for process in children if process.name() == "raylet"]
    raylet.kill()
    facts = finish_driver(driver)
    assert (facts["exit"], facts["states"]) == (0, {"done": 8, "missing": 0})
    assert facts["retried"] >= 1
    assert read_numbers(store, planned) == expected
    wait_for(lambda: not any(map(lives, children)))
