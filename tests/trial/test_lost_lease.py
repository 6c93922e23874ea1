"""A trial whose lock another process has taken over puts no further file in place."""

import math

import pytest

from kvlab.spec import load_sweep
from kvlab.store import Store
from kvlab.sweep import plan
from kvlab.trial import run
from kvlab.trial.run import run_task
from tests.support.tiny_sweep import tiny_sweep_folder


@pytest.fixture
def trial(tmp_path):
    with tiny_sweep_folder(tmp_path):
        yield plan(load_sweep(tmp_path / "s.yaml")).trials[0].trial


def files(directory):
    """Name, identity and size of every file, but for logs, which are appended to."""
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name != "log.txt")
    return {path: (path.stat().st_ino, path.stat().st_size) for path in paths}


@pytest.mark.parametrize(("lock", "stage"), [("training", "training"), ("trial", "evaluation")])
def test_nothing_is_written_after_the_lock_was_lost(tmp_path, monkeypatch, trial, lock, stage):
    monkeypatch.setattr(run, "STOP_CHECK_SECONDS", math.inf)  # the writers alone must notice
    store = Store(tmp_path / "runs")
    directory = {
        "trial": store.trial_directory(trial.id),
        "training": store.training_directory(trial.training_id),
    }[lock]
    left = {}

    def lose_lock(state):
        if state["stage"] == stage and not left:
            (directory / "lock.1").unlink()
            left.update(files(directory))

    assert run_task(trial, store.path, lose_lock) == "elsewhere"
    assert left
    assert files(directory) == left
    assert store.status(trial.id) is None
    assert run_task(trial, store.path) == "done"
