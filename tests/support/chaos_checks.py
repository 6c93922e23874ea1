"""Invariants of a sweep whose processes were killed."""

import json
from pathlib import Path
from typing import Any

from kvlab.fs.atomic_files import file_sha256
from kvlab.spec import load_sweep
from kvlab.store import DETAIL_FILES, Store
from kvlab.store.metrics import METRICS
from kvlab.sweep import plan
from kvlab.track import Tracker
from tests.support.mlflow_contents import read_contents

SWEEP = "s"
_CLOCK_UNITS = ("ms", "tokens/s", "FLOP/s", "times")
_OF_THE_PROCESS = ("training_mfu", "training_peak_bytes", "peak_bytes_cached",
                   "peak_bytes_uncached", "peak_bytes_activations")  # fmt: skip
"""Measurements that differ between undisturbed runs, too: peak sizes of a process."""


class Watch:
    """Check that a result, once written, is never written again."""

    def __init__(self, store: Store):
        self._store = store
        self._seen: dict[str, tuple[int, int]] = {}

    def look(self) -> int:
        """Return the number of results.

        Raises:
            AssertionError: A result has been written again, or is gone.
        """
        now = {}
        for path in (self._store.path / "trials").glob("*/result.json"):
            found = path.stat()
            now[path.parent.name] = (found.st_ino, found.st_mtime_ns)
        for trial, before in self._seen.items():
            assert now.get(trial) == before, f"the result of {trial} was written twice"
        self._seen = now
        return len(now)


def numbers(store: Store, folder: Path, *, may_lack_weights: bool = False) -> dict[str, Any]:
    """Return all that a sweep computed, without what a clock measured.

    Args:
        may_lack_weights: Leave out trainings whose weights or record are gone.
    """
    found: dict[str, Any] = {}
    for planned in plan(load_sweep(folder / "s.yaml"), store).trials:
        trial = planned.trial
        assert planned.state == "done", f"trial {trial.id} is {planned.state}"
        result = store.result(trial.id)
        assert result is not None, "done"
        details = [store.trial_directory(trial.id) / name for name in DETAIL_FILES]
        found[trial.id] = {
            "trial": {key: result[key] for key in ("status", "seed", "kv", "model", "curves")},
            "measurements": {
                name: value
                for name, value in result["measurements"].items()
                if is_reproducible(name)
            },
            "details": [file_sha256(path) for path in details if path.exists()],
        }
        weights = store.training_directory(trial.training_id) / "final" / "model.safetensors"
        if may_lack_weights and not store.is_trained(trial.training_id):
            continue
        record = json.loads((weights.parent.parent / "training.json").read_text())
        found[trial.training_id] = {
            "weights": file_sha256(weights),
            **{key: record[key] for key in ("steps", "tokens", "train_curve", "validation_curve")},
        }
    return found


def is_reproducible(name: str) -> bool:
    """Return whether a measurement is the same in every run."""
    clocked = name in METRICS and METRICS[name].unit in _CLOCK_UNITS
    return not clocked and name not in _OF_THE_PROCESS


def check_record(store: Store, folder: Path, expected: dict[str, Any]) -> None:
    """Check that every trial ended once, with the undisturbed numbers, and that nothing runs."""
    found = numbers(store, folder)
    wrong = [key for key in expected if found.get(key) != expected[key]]
    assert not wrong, f"differ from the undisturbed sweep: {wrong}"
    assert found.keys() == expected.keys()
    assert store.trial_ids() == sorted(store.sweep_trials(SWEEP))
    for trial in store.trial_ids():
        assert not store.is_running(trial), f"{trial} is locked"
        logs = [
            (store.attempt_directory(trial, n) / "log.txt").read_text().splitlines()
            for n in store.attempts(trial)
            if (store.attempt_directory(trial, n) / "log.txt").exists()
        ]
        ends = [log for log in logs if log and log[-1].endswith(" done")]
        assert len(ends) <= 1, f"{trial} was done {len(ends)} times"
    assert not store.is_driven(SWEEP)
    assert not store.stop_flag(SWEEP).exists()


def check_mlflow(store: Store, scratch: Path) -> int:
    """Check that MLflow holds what a sync into an empty database writes, and no active run.

    Returns:
        The number of runs.
    """
    kept = read_contents(f"sqlite:///{store.path}/mlflow.db", SWEEP)
    running = [name for name, (info, *_) in kept.items() if info[0] == "RUNNING"]
    assert not running, f"runs that nobody runs: {running}"
    uri = f"sqlite:///{scratch}/fresh.db"
    Tracker(store.path, uri).mirror(SWEEP)
    fresh = read_contents(uri, SWEEP)
    wrong = [name for name in fresh if kept.get(name) != fresh[name]]
    assert not wrong, f"not as a sync would have them: {wrong}"
    assert kept.keys() == fresh.keys()
    return len(kept)
