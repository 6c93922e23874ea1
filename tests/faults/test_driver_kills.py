"""Drivers in processes of their own, killed, stopped and doubled.

Moments are counted in training steps on disk, not in seconds.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvlab.store import Store
from tests.support.stub_trials import StubRun, numbers, tiny_plan

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 120.0
STARTED: list[subprocess.Popen[str]] = []


def start(folder, *options):
    command = [
        sys.executable,
        "-m",
        "tests.support.drive_stub_sweep",
        str(folder),
        *map(str, options),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=-1, stderr=-1, text=True, start_new_session=True
    )
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def _nothing_left():
    """A test that fails leaves no driver behind."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def finish(process, patience=PATIENCE):
    """What the driver printed last, as JSON."""
    out, error = process.communicate(timeout=patience)
    assert out, error
    return json.loads(out.splitlines()[-1])


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.002)


def logged(store):
    """The steps that every training has logged, in order."""
    return {
        path.parent.name: [int(line) for line in path.read_text().split()]
        for path in (store.path / "trainings").glob("*/steps.log")
    }


def total(store):
    return sum(map(len, logged(store).values()))


def ended(store, planned):
    """The result files that are there, by what tells whether they were written again."""
    found = {}
    for one in planned.trials:
        path = store.trial_directory(one.trial.id) / "result.json"
        if path.exists():
            found[one.trial.id] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


@pytest.fixture
def sweep(tmp_path):
    """The plan, its store, and the numbers of an undisturbed run."""
    planned, calm = tiny_plan(tmp_path), Store(tmp_path / "calm")
    for one in planned.trials:
        StubRun(calm.path)(one.trial)
    return planned, Store(tmp_path / "runs"), numbers(calm, planned)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_driver_killed_again_and_again_ends_with_the_same_results(tmp_path, sweep, seed):
    planned, store, expected = sweep
    chance, kills, before = random.Random(seed), 0, {}
    moments = sorted(chance.sample(range(1, 80), 3))
    for steps in moments:
        driver = start(tmp_path, "--seconds", 0.005)
        wait_for(
            lambda steps=steps, driver=driver: total(store) >= steps or driver.poll() is not None
        )
        kills += driver.poll() is None
        driver.kill()
        driver.communicate()
        now = ended(store, planned)
        assert now.items() >= before.items(), "a result was written twice"
        before = now
    assert kills >= 2
    facts = finish(start(tmp_path))
    assert (facts["exit"], facts["states"]["done"]) == (0, 8)
    assert numbers(store, planned) == expected
    assert ended(store, planned).items() >= before.items()
    missing = 0
    for steps in logged(store).values():
        assert steps == sorted(set(steps)), "a step was done twice"
        missing += 20 - len(steps)
    # the stub logs a step after its checkpoint: a kill between them may lose that line
    assert missing <= kills
    assert finish(start(tmp_path))["ran"] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_at_a_checkpoint(tmp_path, sweep, number):
    planned, store, expected = sweep
    driver = start(tmp_path, "--seconds", 0.02)
    wait_for(lambda: total(store) >= 25)
    driver.send_signal(number)
    facts = finish(driver)
    assert facts["exit"] == 130
    assert 0 < facts["states"]["missing"] < 8
    assert not store.stop_flag("s").exists()
    assert finish(start(tmp_path))["exit"] == 0
    assert numbers(store, planned) == expected
    assert set(map(tuple, logged(store).values())) == {tuple(range(1, 21))}


def test_the_second_signal_ends_it_at_once_and_nothing_is_lost(tmp_path, sweep):
    planned, store, expected = sweep
    first = planned.trials[0].trial.id
    driver = start(tmp_path, "--script", json.dumps([[0, "train", 5, "hang"]]))
    wait_for(lambda: total(store) == 5)
    driver.send_signal(signal.SIGINT)
    wait_for(lambda: list(store.sweep_directory("s").glob("drivers/*.stop")))
    assert driver.poll() is None
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=PATIENCE)
    assert driver.returncode != 0
    assert (store.status(first), store.is_driven("s")) == (None, False)
    assert finish(start(tmp_path))["states"]["done"] == 8
    assert numbers(store, planned) == expected
    assert set(map(tuple, logged(store).values())) == {tuple(range(1, 21))}


@pytest.mark.faults
def test_a_killed_driver_takes_its_cluster_with_it_and_the_next_goes_on(tmp_path, sweep):
    planned, store, expected = sweep
    driver = start(tmp_path, "--executor", "ray", "--seconds", 0.05)
    wait_for(lambda: total(store) >= 10)
    family = psutil.Process(driver.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in family)
    driver.kill()
    driver.communicate()
    wait_for(lambda: not any(map(_lives, family)))
    before, steps = ended(store, planned), total(store)
    assert steps < 80
    assert all(not store.is_running(one.trial.id) for one in planned.trials)
    again = start(tmp_path, "--executor", "ray", "--seconds", 0.05)
    wait_for(lambda: total(store) >= 30)
    os.killpg(again.pid, signal.SIGINT)  # as Ctrl-C at a terminal: to the workers too
    facts = finish(again)
    assert (facts["exit"], facts["retried"]) == (130, 0)
    assert finish(start(tmp_path))["states"]["done"] == 8
    assert numbers(store, planned) == expected
    assert ended(store, planned).items() >= before.items()
    assert all(done == sorted(set(done)) for done in logged(store).values())


@pytest.mark.faults
def test_a_driver_whose_raylet_dies_begins_its_cluster_again(tmp_path, sweep):
    planned, store, expected = sweep
    driver = start(tmp_path, "--executor", "ray", "--seconds", 0.05)
    wait_for(lambda: total(store) >= 10)
    children = psutil.Process(driver.pid).children()
    [raylet] = [process for process in children if process.name() == "raylet"]
    raylet.kill()
    facts = finish(driver)
    assert (facts["exit"], facts["states"]) == (0, {"done": 8, "missing": 0})
    assert facts["retried"] >= 1
    assert numbers(store, planned) == expected
    wait_for(lambda: not any(map(_lives, children)))


def _lives(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
