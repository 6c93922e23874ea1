"""Drivers in processes of their own: start, watch and finish them.

Moments are counted in training steps on disk, not in seconds.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvlab.store import Store
from tests.support.stub_trials import StubRun, read_numbers, tiny_plan

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_SECONDS = 120.0
_STARTED: list[subprocess.Popen[str]] = []


def start_driver(folder, *options):
    command = [sys.executable, "-m", "tests.support.drive_stub_sweep", folder, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words = [*map(str, command)]
    process = subprocess.Popen(words, cwd=ROOT, text=True, start_new_session=True, **pipes)
    _STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def kill_started_drivers():
    """Leave no driver behind after a test that fails."""
    yield
    while _STARTED:
        process = _STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def finish_driver(process, timeout=TIMEOUT_SECONDS):
    """Wait for a driver to end; return what it printed last, as JSON."""
    out, error = process.communicate(timeout=timeout)
    assert out, error
    return json.loads(out.splitlines()[-1])


def wait_for(condition):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.002)


def read_logged_steps(store):
    """Return the steps that every training has logged, in order."""
    return {
        path.parent.name: [int(line) for line in path.read_text().split()]
        for path in (store.path / "trainings").glob("*/steps.log")
    }


def count_logged_steps(store):
    return sum(map(len, read_logged_steps(store).values()))


def list_results(store, planned):
    """Return inode and time of every result file, which change if it is written again."""
    found = {}
    for one in planned.trials:
        path = store.trial_directory(one.trial.id) / "result.json"
        if path.exists():
            found[one.trial.id] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


@pytest.fixture
def interrupted_sweep(tmp_path):
    """Return the plan, its store, and the numbers of an undisturbed run."""
    planned, calm = tiny_plan(tmp_path), Store(tmp_path / "calm")
    for one in planned.trials:
        StubRun(calm.path)(one.trial)
    return planned, Store(tmp_path / "runs"), read_numbers(calm, planned)
