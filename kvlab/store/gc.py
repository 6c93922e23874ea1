"""What a store holds that nothing needs any more, found first and removed only when asked.

Removing takes the lock of the trial or the training, so nothing goes under a process that works
in it; the lock's own files stay, since others may be waiting at it.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvlab.errors import StoreError
from kvlab.fs.atomic_files import read_json
from kvlab.fs.lease import is_lease_file
from kvlab.fs.lock import Lock, seems_held
from kvlab.store.store import Store

_TEMPORARY_FILE_FOLDERS = (".", "final", "checkpoints", "attempts")
"""Where a kill can leave half of a file or folder, under a name that begins with a dot."""


@dataclass(frozen=True)
class Garbage:
    """One thing to remove; ``lock`` is held by whoever uses it."""

    path: Path
    bytes: int
    why: str
    lock: Path = field(repr=False)


def find_garbage(
    store: Store, *, weights: bool = False, unused: bool = False, pruned: bool = False
) -> list[Garbage]:
    """What can go, the largest first; what some process uses now is left out.

    Always: what a kill left half written, and checkpoints of trainings that have ended.

    Args:
        weights: also final weights, where every sweep that uses them has ended.
        pruned: also checkpoints of trainings of which no trial is more than pruned; one that is
            promoted then begins anew, and comes out the same.
        unused: also trials, and their trainings, that no sweep of the store asks for.
    """
    found = [*_find_temporary_files(store), *_find_checkpoints(store)]
    if weights:
        found += _find_measured_weights(store)
    if unused:
        found += _find_unused(store)
    if pruned:
        found += _find_pruned_checkpoints(store)
    inside = {item.path for item in found}
    whole = (item for item in found if not inside.intersection(item.path.parents))
    return sorted(whole, key=lambda item: (-item.bytes, item.path))


def remove_garbage(item: Garbage) -> bool:
    """Removes one thing; False if some process uses it now.

    Raises:
        StoreError: it cannot be removed.
    """
    with Lock(item.lock).hold(timeout=0.0) as ours:
        if not ours:
            return False
        try:
            if item.path == item.lock.parent:
                for name in os.listdir(item.path):
                    if not is_lease_file(item.lock, name):
                        _delete(item.path / name)
            else:
                _delete(item.path)
        except OSError as error:
            text = f"{item.path} cannot be removed: {error.strerror}"
            raise StoreError(f"{text}; check its rights") from None
    return True


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _find_temporary_files(store: Store) -> Iterator[Garbage]:
    for kind in ("trials", "trainings", "sweeps"):
        for directory in _list_folders(store.path / kind):
            lock = directory / "lock"
            for place in _TEMPORARY_FILE_FOLDERS:
                for path in _list_entries(directory / place):
                    if path.name.startswith("."):
                        yield from _make_garbage(
                            path, "half written when something was killed", lock
                        )


def _find_checkpoints(store: Store) -> Iterator[Garbage]:
    for directory in _list_folders(store.path / "trainings"):
        if store.is_trained(directory.name):
            why = "checkpoints of a finished training"
        elif (directory / "diverged.json").exists():
            why = "checkpoints of a training that diverged"
        else:
            continue
        yield from _make_garbage(directory / "checkpoints", why, directory / "lock")


def _find_measured_weights(store: Store) -> Iterator[Garbage]:
    """Final weights that no sweep of the store still has to measure."""
    needed: set[str] = set()
    for name in store.sweep_names():
        trials = store.sweep_trials(name)
        if not all(store.status(trial) in ("done", "diverged", "pruned") for trial in trials):
            needed |= {_read_training_id(store, trial) for trial in trials}
    for directory in _list_folders(store.path / "trainings"):
        if directory.name not in needed:
            why = "weights that every sweep has measured"
            yield from _make_garbage(directory / "final", why, directory / "lock")


def _find_pruned_checkpoints(store: Store) -> Iterator[Garbage]:
    states: dict[str, set[str | None]] = {}
    for trial in store.trial_ids():
        states.setdefault(_read_training_id(store, trial), set()).add(store.status(trial))
    for directory in _list_folders(store.path / "trainings"):
        if states.get(directory.name) == {"pruned"}:
            why = "checkpoints of a training that a search has pruned"
            yield from _make_garbage(directory / "checkpoints", why, directory / "lock")


def _find_unused(store: Store) -> Iterator[Garbage]:
    asked = {trial for name in store.sweep_names() for trial in store.sweep_trials(name)}
    trainings = {_read_training_id(store, trial) for trial in asked}
    for directory in _list_folders(store.path / "trials"):
        if directory.name not in asked:
            yield from _make_garbage(
                directory, "a trial that no sweep asks for", directory / "lock"
            )
    for directory in _list_folders(store.path / "trainings"):
        if directory.name not in trainings:
            why = "a training that no sweep asks for"
            yield from _make_garbage(directory, why, directory / "lock")


def _read_training_id(store: Store, trial: str) -> str:
    try:
        return str(read_json(store.trial_directory(trial) / "trial.json")["training"])
    except (FileNotFoundError, StoreError, KeyError):
        return ""


def _make_garbage(path: Path, why: str, lock: Path) -> Iterator[Garbage]:
    names = [entry for entry in _list_entries(path) if not is_lease_file(lock, entry.name)]
    if path.is_symlink() or not path.exists() or (path.is_dir() and not names):
        return
    if not seems_held(lock):
        yield Garbage(path, _count_bytes(path), why, lock)


def _count_bytes(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


def _list_folders(path: Path) -> list[Path]:
    return [entry for entry in _list_entries(path) if entry.is_dir() and not entry.is_symlink()]


def _list_entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        text = f"{path} cannot be read: {error.strerror}; check its rights"
        raise StoreError(text) from None
