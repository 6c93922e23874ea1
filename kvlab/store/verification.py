"""Check every file of the record against what was written, and heal what is damaged.

All healing of a record follows the rules of `heal_damage`: `kvlab verify --heal` heals what a check
has found, a submit the sweep's own files, and a trial its result and its training under the locks
that it holds.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab.errors import RecordDamaged, StoreError
from kvlab.fs.lock import Lock
from kvlab.fs.sealed_files import check_file, read_seal, seal_file, set_aside, write_sealed_json
from kvlab.store.record_forms import read_record
from kvlab.store.store import TRAINING_FILES, Store
from kvlab.store.store_paths import POINTS_FOLDER, list_folders, list_point_files
from kvlab.store.timings import TIMINGS_FILE
from kvlab.store.trial_records import RESULT_FILES, SCHEMA

_SEARCH_FILES = ("search.json", POINTS_FOLDER)
"""The history of a search, which is made again as a whole."""

_REMEDIES = {
    "sweep.json": "submit the sweep again, which writes it anew",
    "search.json": "submit the sweep again: the search makes the same suggestions",
    "reported.json": "which seeds earlier reports have shown is forgotten",
    TIMINGS_FILE: "submit the sweep again: its trials are timed again",
    "trial.json": "written again with the next result",
    "result.json": "submit the sweep again: the trial is measured again",
    "training.json": "trained again when a trial needs its weights",
    "config.json": "written again when the training goes on",
    "start.json": "the training begins anew",
    "diverged.json": "the training runs again",
    "rungs.json": "measured again when a search needs them",
    "state.json": "the training resumes from the checkpoint before",
}

Rebuild = Callable[[Store, str, Path], dict[str, Any] | None]
"""Returns the description of a sweep from a damaged one at a path; None if it cannot be made. See
`kvlab.sweep.planning.stages.rebuild_description`."""


@dataclass(frozen=True)
class Damage:
    """A damaged part of the record.

    Attributes:
        path: the file, relative to the store.
        reason: what is wrong with it.
        remedy: what makes it again.
        directory: the directory of the store that it belongs to, with a lock of its own.
        names: what has to be moved aside in that directory.
    """

    path: str
    reason: str
    remedy: str
    directory: Path = field(repr=False)
    names: tuple[str, ...] = field(repr=False)


@dataclass
class Verification:
    """What a check of the record read.

    Attributes:
        trials, trainings: numbers of those that were read.
        paths: the files that are what was written.
        datasets: digests of the datasets that trials were trained on.
        damaged: what is wrong.
        notes: what is not as it was, and is no damage.
    """

    trials: int = 0
    trainings: int = 0
    paths: list[Path] = field(default_factory=list)
    datasets: set[str] = field(default_factory=set)
    damaged: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def list_trial_files(store: Store, trial: str) -> tuple[list[dict[str, str]], list[str]]:
    """Check the files of a trial and of its training.

    Returns:
        The files, and notes on what is not as it was and is no damage. A file is its ``path``
        in the store, the ``sha256`` of its contents, or of sealed JSON the hash at its end, and
        what ``problem`` it has. One of the last two is empty.

    Raises:
        StoreError: a file cannot be read.
    """
    verifier, training = _Verifier(store), store.read_training_id(trial)
    verifier.verify(store.trial_directory(trial))
    found = verifier.found
    if training is not None:
        directory = store.training_directory(training)
        verifier.verify(directory)
        if (directory / "training.json").exists() and not (directory / "final").exists():
            found.notes.append(f"the weights of training {training} were removed since")
    damaged = [{"path": one.path, "sha256": "", "problem": one.reason} for one in found.damaged]
    files = []
    for path in found.paths:
        try:
            sha256 = read_seal(path)
        except RecordDamaged:  # no JSON
            sha256 = seal_file(path)["sha256"]
        relative = path.relative_to(store.path).as_posix()
        files.append({"path": relative, "sha256": sha256, "problem": ""})
    return [*files, *damaged], found.notes


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
    verifier = _Verifier(store)
    folders = {
        "trials": [store.trial_directory(trial) for trial in store.trial_ids()],
        "trainings": list_folders(store.path / "trainings"),
    }
    if sweep is None:
        others = (*list_folders(store.path / "sweeps"), *list_folders(store.path / "trunks"))
        for directory in others:
            verifier.verify(directory)
    else:
        verifier.verify(store.sweep_directory(sweep))
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
            verifier.verify(directory)
    # a process that works meanwhile replaces files one after the other: look again
    found = verifier.found
    found.damaged = [damage for damage in found.damaged if _is_damaged_still(damage)]
    return found


def check_record(store: Store, sweep: str) -> None:
    """Check every file of a sweep's record.

    Raises:
        RecordDamaged: some are not what was written.
        UsageError: the store has no such sweep.
    """
    damaged = verify_record(store, sweep).damaged
    if damaged:
        lines = "".join(f"\n  {damage.path}: {damage.reason}" for damage in damaged)
        hint = f"`kvlab verify {sweep} --heal` moves them aside, and a submit makes them again"
        raise RecordDamaged(f"the record of {sweep} does not verify; {hint}{lines}")


class _Verifier:
    """Check directories of a store, and collect what was found."""

    def __init__(self, store: Store):
        self.store, self.found = store, Verification()

    def verify(self, directory: Path) -> None:
        """Check the directory of a sweep, a trial, a training or a trunk."""
        match directory.parent.name:
            case "sweeps":
                for file in ("sweep.json", "reported.json", TIMINGS_FILE):
                    self.check_record(directory, file)
                points = [f"{POINTS_FOLDER}/{path.name}" for path in list_point_files(directory)]
                for file in ("search.json", *points):
                    self.check_record(directory, file, _SEARCH_FILES)
            case "trials":
                self.found.trials += 1
                self.check_record(directory, "trial.json")
                result = self.check_record(directory, "result.json", RESULT_FILES)
                if result:
                    self._note_training(directory.name, result)
            case "trainings":
                self.found.trainings += 1
                whole = (directory, "training.json", TRAINING_FILES)
                if not self.check_record(*whole, may_lack_weights=True):
                    self.check_record(directory, "config.json")
                    self.check_record(directory, "start.json", ("start.json", "checkpoints"))
                self.check_record(directory, "diverged.json")
                self.check_record(directory, "rungs.json")
        for path in sorted((*directory.glob("checkpoints/step-*"), *directory.glob("step-*"))):
            folder = path.relative_to(directory).as_posix()
            self.check_record(directory, f"{folder}/state.json", (folder,))

    def _note_training(self, trial: str, result: Mapping[str, Any]) -> None:
        """Note the text of a result, and weights that are not those that it measured."""
        data = (result.get("provenance") or {}).get("data") or {}
        self.found.datasets |= {data["digest"]} if "digest" in data else set()
        try:
            seal = self.store.training_seal(result["training"])
        except RecordDamaged:
            return  # reported with the training
        if seal != result.get("training_seal", seal):
            training, then = f"(training {result['training']})", ""
            what = "that have been trained again since"
            if seal is None:
                what, then = "whose record is gone", "; a trial that needs them trains again"
            text = f"trials/{trial} was measured on weights {what} {training}{then}"
            self.found.notes.append(text)

    def check_record(
        self,
        directory: Path,
        name: str,
        whole: tuple[str, ...] = (),
        *,
        may_lack_weights: bool = False,
    ) -> dict[str, Any]:
        """Check a sealed file and those that it lists.

        Args:
            whole: what is moved aside with it.

        Returns:
            Its content; empty if there is none, or if it is damaged.
        """
        path = directory / name
        remedy = _REMEDIES.get(path.name, _REMEDIES["search.json"])  # a point's name is a number

        def add(file: Path, error: RecordDamaged) -> None:
            reason = str(error).removeprefix(f"{file} ").removeprefix("is damaged: ")
            relative = file.relative_to(self.store.path).as_posix()
            self.found.damaged.append(Damage(relative, reason, remedy, directory, whole or (name,)))

        try:
            content = read_record(path)
            self.found.paths.append(path)
        except FileNotFoundError:
            return {}
        except RecordDamaged as error:
            add(path, error)
            return {}
        for listed, seal in content.get("files", {}).items():
            file = path.parent / listed
            if may_lack_weights and not listed.endswith(".json") and not os.path.lexists(file):
                continue  # garbage collection removes weights that have been measured
            try:
                check_file(file, seal)
                self.found.paths.append(file)
            except RecordDamaged as error:
                add(file, error)
        return content


def heal_damage(damage: Damage, rebuild: Rebuild | None = None) -> Path | None:
    """Move a damaged part of the record aside, and write again what can be written from the rest.

    Nothing is moved that has been made again since it was found.

    Args:
        rebuild: makes the description of a sweep; without it a submit does.

    Returns:
        Where it is now; None if a process uses the directory, or drives the sweep.

    Raises:
        StoreError: the store cannot be written.
    """
    directory = damage.directory
    store, is_sweep = Store(directory.parent.parent), directory.parent.name == "sweeps"
    with Lock(directory / "lock").hold(timeout=0.0) as fence:
        if fence is None or (is_sweep and store.is_driven(directory.name)):
            return None
        if not _is_damaged_still(damage):
            return directory / "damaged"  # made again, or moved with another file
        target = set_aside(directory, damage.names, fence)
        if damage.names == ("sweep.json",) and rebuild is not None:
            description = rebuild(store, directory.name, target / "sweep.json")
            if description is not None and fence.holds():
                store.write_sweep(description)
        elif damage.names == ("trial.json",):
            try:
                result = read_record(directory / "result.json")
                facts = {key: result[key] for key in ("trial", "training", "seed", "experiment")}
                identity = result["provenance"]["data"]["digest"]
            except (FileNotFoundError, StoreError, KeyError, TypeError):
                return target
            content = {"schema": SCHEMA, **facts, "data_identity": identity}
            write_sealed_json(directory / "trial.json", content)
        return target


def heal_description(store: Store, sweep: str, rebuild: Rebuild | None = None) -> list[str]:
    """Heal the damaged files of a sweep's own directory, unless a driver runs the sweep.

    They are written again by a submit: what was decided follows from the results of the trials.

    Returns:
        A line for each.
    """
    verifier = _Verifier(store)
    verifier.verify(store.sweep_directory(sweep))
    lines = []
    for damage in verifier.found.damaged:
        aside = heal_damage(damage, rebuild)
        if aside is not None:
            text = f"{damage.path} is damaged: {damage.reason}; moved to {aside}"
            lines.append(f"{text}, and written again from the results of the trials")
    return lines


def _is_damaged_still(damage: Damage) -> bool:
    """Return whether a part of the record is damaged now, by another look at its directory."""
    again = _Verifier(Store(damage.directory.parent.parent))
    again.verify(damage.directory)
    return any(found.path == damage.path for found in again.found.damaged)
