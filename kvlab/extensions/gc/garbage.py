"""Garbage collection: find what a store does not need any more, and remove it on request.

Removal requires the lock of the trial or the training, so nothing is taken from a process that
uses it. The lock's own files stay, since others may wait at them.
"""

import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvlab.errors import StoreError
from kvlab.fs.lease import is_lease_file
from kvlab.fs.lock import Lock, seems_held
from kvlab.spec.spec_model import NAME_PATTERN
from kvlab.store.store import Store
from kvlab.store.store_paths import list_folders, list_names

_TEMPORARY_FILE_FOLDERS = (".", "final", "checkpoints", "attempts", "points")
"""Where a killed process can leave an unfinished file, under a name that begins with a dot."""


@dataclass(frozen=True)
class Garbage:
    """A file or folder to remove.

    Attributes:
        reason: why it is not needed, for people.
        lock: held by the process that uses it.
    """

    path: Path
    bytes: int
    reason: str
    lock: Path = field(repr=False)


def find_garbage(
    store: Store, *, weights: bool = False, unused: bool = False, pruned: bool = False
) -> list[Garbage]:
    """Return what can be removed, the largest first, without what a process uses now.

    Unfinished files, the checkpoints of trainings that have ended, partial evaluations of trials
    that have ended, what other code made and ``--code rerun`` set aside, and stable phases that no
    sweep branches from any more are always included.

    Args:
        weights: include final weights where every sweep that uses them has ended.
        unused: include trials and trainings that no sweep of the store contains.
        pruned: include checkpoints of trainings whose trials are all pruned. A trial that is
            promoted later then trains from the start, with the same result.
    """
    garbage = [*_find_temporary_files(store), *_find_checkpoints(store, pruned)]
    garbage += _find_leftovers(store)
    if list_folders(store.path / "trunks"):
        trunks = {store.read_trunk_id(trial) for trial in _list_unfinished(store)}
        reason = "a stable phase that every token budget has branched from"
        garbage += _find_unneeded(store, "trunks", trunks, reason)
    if weights:
        trainings = {store.read_training_id(trial) for trial in _list_unfinished(store)}
        reason = "weights that every sweep has measured"
        garbage += _find_unneeded(store, "trainings", trainings, reason, "final")
    if unused:
        trials = {trial for own in _list_sweeps(store).values() for trial in own}
        trainings = {store.read_training_id(trial) for trial in trials}
        garbage += _find_unneeded(store, "trials", trials, "a trial that no sweep asks for")
        reason = "a training that no sweep asks for"
        garbage += _find_unneeded(store, "trainings", trainings, reason)
    paths = {item.path for item in garbage}
    outermost = (item for item in garbage if not paths.intersection(item.path.parents))
    return sorted(outermost, key=lambda item: (-item.bytes, item.path))


def remove_garbage(item: Garbage) -> bool:
    """Remove one item and return whether it was removed: not if a process uses it now.

    Raises:
        StoreError: it cannot be removed.
    """
    with Lock(item.lock).hold(timeout=0.0) as fence:
        if fence is None:
            return False
        paths = [item.path]
        try:
            if item.path == item.lock.parent and not item.path.is_symlink():
                paths = [p for p in item.path.iterdir() if not is_lease_file(item.lock, p.name)]
            for path in paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            text = f"{item.path} cannot be removed: {error.strerror}"
            raise StoreError(f"{text}; check its permissions") from None
    return True


def _find_temporary_files(store: Store) -> Iterator[Garbage]:
    for kind in ("trials", "trainings", "trunks", "sweeps"):
        for directory in list_folders(store.path / kind):
            for folder in _TEMPORARY_FILE_FOLDERS:
                if (directory / folder).is_symlink():
                    continue  # what it leads to is not ours
                for name in list_names(directory / folder):
                    if name.startswith("."):
                        reason = "half written when something was killed"
                        yield from _make_garbage(directory / folder / name, reason, directory)


def _find_checkpoints(store: Store, pruned: bool) -> Iterator[Garbage]:
    statuses: dict[str | None, set[str | None]] = {}
    for trial in store.trial_ids() if pruned else ():
        statuses.setdefault(store.read_training_id(trial), set()).add(store.status(trial))
    for directory in list_folders(store.path / "trainings"):
        if store.is_trained(directory.name):
            reason = "checkpoints of a finished training"
        elif (directory / "diverged.json").exists():
            reason = "checkpoints of a training that diverged"
        elif statuses.get(directory.name) == {"pruned"}:
            reason = "checkpoints of a training that a search has pruned"
        else:
            continue
        yield from _make_garbage(directory / "checkpoints", reason, directory)


def _find_leftovers(store: Store) -> Iterator[Garbage]:
    for kind in ("trainings", "trunks", "sweeps"):
        for directory in list_folders(store.path / kind):
            reason = "results of other code, which were computed again"
            yield from _make_garbage(directory / "other-code", reason, directory)
    for trial in store.trial_ids():
        if store.status(trial) not in (None, "damaged"):
            directory = store.trial_directory(trial)
            reason = "a partial evaluation of a trial that has ended"
            yield from _make_garbage(directory / "partial", reason, directory)


def _list_sweeps(store: Store) -> dict[str, list[str]]:
    """Return the trials of every sweep.

    Raises:
        StoreError: a sweep has no description, or a damaged one: what it needs is unknown.
    """
    names = store.sweep_names()
    for folder in list_folders(store.path / "sweeps"):
        if folder.name not in names and re.match(NAME_PATTERN, folder.name):
            text = f"{folder} has no sweep.json, so which trials it needs is unknown"
            raise StoreError(f"{text}; submit that sweep again, or remove its folder")
    return {name: store.sweep_trials(name) for name in names}


def _list_unfinished(store: Store) -> Iterator[str]:
    """Yield the trials of every sweep that has not ended, also those that have."""
    for trials in _list_sweeps(store).values():
        if not all(store.status(trial) in ("done", "diverged", "pruned") for trial in trials):
            yield from trials


def _find_unneeded(
    store: Store, kind: str, needed: Collection[str | None], reason: str, part: str = "."
) -> Iterator[Garbage]:
    """Find a part of each directory of a kind whose id is not needed."""
    for directory in list_folders(store.path / kind):
        if directory.name not in needed:
            yield from _make_garbage(directory / part, reason, directory)


def _make_garbage(path: Path, reason: str, directory: Path) -> Iterator[Garbage]:
    """Yield an item, unless ``path`` is empty or a process uses its directory."""
    lock = directory / "lock"
    names = [name for name in list_names(path) if not is_lease_file(lock, name)]
    if path.is_symlink() or not path.exists() or (path.is_dir() and not names):
        return
    if not seems_held(lock):
        files = (file for file in (path, *path.rglob("*")) if not file.is_dir())
        yield Garbage(path, sum(file.lstat().st_size for file in files), reason, lock)
