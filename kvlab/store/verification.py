"""Check every file of the record against what was written, and heal what is damaged.

`heal_directory` is the one place that heals a record. Under the lock on a directory it checks every
file there, and moves what is damaged aside, with what depends on it. `kvlab verify --heal` calls it
for what a check has found, a submit for the sweep's own files, and a trial for its result and its
training.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvlab.errors import RecordDamaged, StoreError
from kvlab.fs.lease import Fence, lease_seconds
from kvlab.fs.lock import Lock, seems_held
from kvlab.fs.sealed_files import check_file, set_aside, write_sealed_json
from kvlab.store.record_forms import SCHEMA, read_record
from kvlab.store.store import Store
from kvlab.store.store_paths import POINTS_FOLDER, format_level, list_folders, list_point_files
from kvlab.store.timings import TIMINGS_FILE
from kvlab.store.trial_records import RESULT_FILES

_SEARCH_FILES = ("search.json", POINTS_FOLDER)
"""The history of a search, which is made again as a whole."""

_TRAINING_FILES = ("training.json", "final", "config.json")
"""What a training writes again at its end if it goes on from a checkpoint."""

_START_FILES = ("start.json", "checkpoints")
"""What a training writes again if it begins anew: no checkpoint has the record of its start."""


@dataclass(frozen=True)
class Damage:
    """A damaged part of the record.

    Attributes:
        path: the file, relative to the store.
        reason: what is wrong with it.
        directory: the directory of the store that it belongs to, with a lock of its own.
        names: what has to be moved aside in that directory.
        aside: the folder that it was moved to; None as long as it is in its place.
    """

    path: str
    reason: str
    directory: Path = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    aside: Path | None = None

    def __str__(self) -> str:
        moved = "" if self.aside is None else f"; moved to {self.aside}"
        return f"{self.path} is damaged: {self.reason}{moved}"


@dataclass
class Verification:
    """What a check of the record has read so far.

    Args:
        store: whose directories are checked.
        contents: read the files that sealed ones list; otherwise only their size is compared.

    Attributes:
        trials, trainings: numbers of those that were read.
        paths: the files that are what was written.
        ended: ids of the trials whose result is what was written.
        datasets: digests of the datasets that trials were trained on.
        damaged: what is wrong.
        notes: what is not as it was, and is no damage.
    """

    store: Store
    contents: bool = True
    trials: int = 0
    trainings: int = 0
    paths: list[Path] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    datasets: set[str] = field(default_factory=set)
    damaged: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self, directory: Path) -> None:
        """Check the directory of a sweep, a trial, a training or a trunk."""
        match directory.parent.name:
            case "sweeps":
                for file in ("sweep.json", "reported.json", TIMINGS_FILE):
                    self._check_file(directory, file)
                points = {path.name for path in list_point_files(directory)}
                points |= {f"{format_level(number + 1)}.json" for number in range(len(points))}
                for file in ("search.json", *(f"{POINTS_FOLDER}/{one}" for one in sorted(points))):
                    self._check_file(directory, file, _SEARCH_FILES, must_exist=bool(points))
            case "trials":
                self.trials += 1
                self._check_file(directory, "trial.json")
                result = self._check_file(directory, "result.json", RESULT_FILES)
                if result:
                    self._note_training(directory.name, result)
            case "trainings":
                self.trainings += 1
                whole = (directory, "training.json", _TRAINING_FILES)
                if not self._check_file(*whole, may_lack_weights=True):
                    config = self._check_file(directory, "config.json")
                    has_start = "start" in config and (directory / "checkpoints").exists()
                    start = (directory, "start.json", _START_FILES)
                    self._check_file(*start, must_exist=has_start)
                self._check_file(directory, "diverged.json")
                self._check_file(directory, "rungs.json")
        for path in sorted((*directory.glob("checkpoints/step-*"), *directory.glob("step-*"))):
            folder = path.relative_to(directory).as_posix()
            self._check_file(directory, f"{folder}/state.json", (folder,))

    def _note_training(self, trial: str, result: Mapping[str, Any]) -> None:
        """Note the text of a result, and weights that are not those that it measured."""
        self.ended.append(trial)
        data = (result.get("provenance") or {}).get("data") or {}
        self.datasets |= {data["digest"]} if "digest" in data else set()
        try:
            seal = self.store.training_seal(result["training"])
        except RecordDamaged:
            return  # reported with the training
        if seal != result.get("training_seal", seal):
            what = "whose record is gone" if seal is None else "that have been trained again since"
            text = f"trials/{trial} was measured on weights {what} (training {result['training']})"
            self.notes.append(text)

    def _check_file(
        self,
        directory: Path,
        name: str,
        whole: tuple[str, ...] = (),
        *,
        may_lack_weights: bool = False,
        must_exist: bool = False,
    ) -> dict[str, Any]:
        """Check a sealed file and those that it lists.

        Args:
            whole: what is moved aside with it.

        Returns:
            Its content; empty if there is none, or if it is damaged.
        """
        path = directory / name

        def add(file: Path, error: RecordDamaged) -> None:
            reason = str(error).removeprefix(f"{file} ").removeprefix("is damaged: ")
            relative = file.relative_to(self.store.path).as_posix()
            self.damaged.append(Damage(relative, reason, directory, whole or (name,)))

        try:
            content = read_record(path)
            self.paths.append(path)
        except FileNotFoundError:
            if must_exist:
                add(path, RecordDamaged("it is missing"))
            return {}
        except RecordDamaged as error:
            add(path, error)
            return {}
        for listed, seal in content.get("files", {}).items():
            file = path.parent / listed
            is_weights = not listed.endswith(".json")
            if may_lack_weights and is_weights and not os.path.lexists(file):
                continue  # garbage collection removes weights that have been measured
            try:
                check_file(file, seal, contents=self.contents or not is_weights)
                self.paths.append(file)
            except RecordDamaged as error:
                add(file, error)
        return content


def verify_record(
    store: Store, sweep: str | None = None, on_progress: Callable[[str], None] | None = None
) -> Verification:
    """Read the record and check every file that was sealed.

    Args:
        sweep: only the trials of this sweep; default the whole store.
        on_progress: receives lines for the person who waits.

    Raises:
        UsageError: the store has no such sweep.
        StoreError: a file cannot be read.
    """
    found = Verification(store)
    folders = {
        "trials": [store.trial_directory(trial) for trial in store.trial_ids()],
        "trainings": list_folders(store.path / "trainings"),
    }
    if sweep is None:
        others = (*list_folders(store.path / "sweeps"), *list_folders(store.path / "trunks"))
        for directory in others:
            found.check(directory)
    else:
        found.check(store.sweep_directory(sweep))
        try:
            trials = set(store.sweep_trials(sweep))
        except RecordDamaged:
            trials = set()
        own = {store.read_training_id(trial) for trial in trials}
        for kind, known in (("trials", trials), ("trainings", own)):
            folders[kind] = [folder for folder in folders[kind] if folder.name in known]
    for kind, directories in folders.items():
        for number, directory in enumerate(directories, 1):
            if on_progress is not None:
                on_progress(f"{kind.removesuffix('s')} {number} of {len(directories)}")
            found.check(directory)
    # a process that works meanwhile replaces files one after the other: look again
    folders_again = {damage.directory for damage in found.damaged}
    still = {damage.path for folder in folders_again for damage in _find_damage(folder)}
    found.damaged = [damage for damage in found.damaged if damage.path in still]
    return found


def check_record(store: Store, sweep: str) -> None:
    """Check every file of a sweep's record.

    Raises:
        RecordDamaged: some are not what was written.
        UsageError: the store has no such sweep.
    """
    damaged = verify_record(store, sweep).damaged
    if damaged:
        lines = "".join(f"\n  {damage}" for damage in damaged)
        hint = f"`kvlab verify {sweep} --heal` moves them aside, and a submit makes them again"
        raise RecordDamaged(f"the record of {sweep} does not verify; {hint}{lines}")


def heal(directory: Path) -> list[Damage] | None:
    """Heal a directory of the record, unless a process uses it or drives the sweep.

    Returns:
        What was moved aside; None if the directory is in use.

    Raises:
        StoreError: the store cannot be written.
    """
    if not _find_damage(directory):
        return []
    store, lock = Store(directory.parent.parent), Lock(directory / "lock")
    # a holder that is gone is given up after its lease
    with lock.hold(0.0 if seems_held(lock.path) else 2 * lease_seconds()) as fence:
        is_sweep = directory.parent.name == "sweeps"
        if fence is None or (is_sweep and store.is_driven(directory.name)):
            return None
        return heal_directory(directory, fence)


def heal_directory(directory: Path, fence: Fence, *, contents: bool = True) -> list[Damage]:
    """Move damaged files of a directory aside, and write again what follows from the others.

    The rest is made again by what needs it. Requires the lock on the directory.

    Args:
        contents: read weights, too; otherwise only their size is compared.

    Returns:
        What was moved aside.

    Raises:
        StoreError, LeaseLost: the store cannot be written, or the lock was taken over.
    """
    damaged, healed = _find_damage(directory, contents=contents), list[Damage]()
    target: Path | None = None
    for names in dict.fromkeys(damage.names for damage in damaged):
        if any(os.path.lexists(directory / name) for name in names):  # not moved with others
            target = set_aside(directory, names, fence)
        healed += [replace(one, aside=target) for one in damaged if one.names == names]
        if names == ("trial.json",):
            with contextlib.suppress(FileNotFoundError, StoreError, KeyError, TypeError):
                result = read_record(directory / "result.json")
                kept = {key: result[key] for key in ("trial", "training", "seed", "experiment")}
                kept["data_identity"] = result["provenance"]["data"]["digest"]
                write_sealed_json(directory / "trial.json", {"schema": SCHEMA, **kept}, fence=fence)
    return healed


def _find_damage(directory: Path, *, contents: bool = True) -> list[Damage]:
    found = Verification(Store(directory.parent.parent), contents)
    found.check(directory)
    return found.damaged
