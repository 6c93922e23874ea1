"""Check every file of the record against what was written, and move aside what is damaged."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab.errors import RecordDamaged, StoreError
from kvlab.fs.lock import Lock
from kvlab.fs.sealed_files import (
    check_file,
    check_form,
    read_seal,
    read_sealed_json,
    seal_file,
    set_aside,
    write_sealed_json,
)
from kvlab.store.record_forms import (
    HistoryForm,
    PointForm,
    ReportedForm,
    ResultForm,
    RungsForm,
    SweepForm,
    TimingsForm,
    TrainingForm,
)
from kvlab.store.store import TRAINING_FILES, Store
from kvlab.store.store_paths import POINT_KEYS, POINTS_FOLDER, list_point_files
from kvlab.store.timings import TIMINGS_FILE
from kvlab.store.trial_records import DETAIL_FILES, SCHEMA

_SWEEP_FILES = {
    "sweep.json": "submit the sweep again, which writes it anew",
    "search.json": "submit the sweep again: the search makes the same suggestions",
    "reported.json": "which seeds earlier reports have shown is forgotten",
    TIMINGS_FILE: "submit the sweep again: its trials are timed again",
}
_KEYS = {
    "sweep.json": ("name", "cells"),
    "search.json": ("search", "seconds"),
    "reported.json": ("seeds",),
    TIMINGS_FILE: ("sessions",),
    "trial.json": ("trial",),
    "result.json": ("trial", "training", "status"),
    "training.json": ("files",),
    "diverged.json": ("message",),
    "rungs.json": ("rungs",),
    "state.json": ("files", "state"),
}
"""What a file of each kind has."""

_FORMS: dict[str, Any] = {
    "sweep.json": SweepForm,
    "result.json": ResultForm,
    "training.json": TrainingForm,
    "rungs.json": RungsForm,
    "reported.json": ReportedForm,
    "search.json": HistoryForm,
    TIMINGS_FILE: TimingsForm,
}

_RUN_AGAIN = "submit the sweep again: the trial is measured again"
_TRAIN_AGAIN = "trained again when a trial needs its weights"


@dataclass(frozen=True)
class Damage:
    """A damaged part of the record.

    Attributes:
        path: the file, relative to the store.
        reason: what is wrong with it.
        remedy: what makes it again.
        directory: the directory of the store that it belongs to.
        names: what has to be moved aside in that directory.
        lock: lock of the directory.
    """

    path: str
    reason: str
    remedy: str
    directory: Path = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    lock: Path = field(repr=False)


@dataclass
class Verification:
    """What a check of the record read.

    Attributes:
        trials, trainings, bytes: what was read, in numbers.
        paths: the files that are what was written.
        datasets: digests of the datasets that trials were trained on.
        damaged: what is wrong.
        notes: what is not as it was, and is no damage.
    """

    trials: int = 0
    trainings: int = 0
    bytes: int = 0
    paths: list[Path] = field(default_factory=list)
    datasets: set[str] = field(default_factory=set)
    damaged: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def files(self) -> int:
        return len(self.paths)


@dataclass(frozen=True)
class TrialFile:
    """A sealed file that a trial rests on.

    Attributes:
        path: relative to the store.
        sha256: of its contents; of sealed JSON the hash at its end; empty if it does not verify.
        problem: what is wrong with it; empty if nothing is.
    """

    path: str
    sha256: str
    problem: str = ""


def list_trial_files(store: Store, trial: str) -> tuple[list[TrialFile], list[str]]:
    """Check the files of a trial and of its training.

    Returns:
        The files, and notes on what is not as it was and is no damage.

    Raises:
        StoreError: a file cannot be read.
    """
    verifier = _Verifier(store, lambda _: None)
    verifier.verify_trial(trial)
    training = store.read_training_id(trial) or _recorded_training(store, trial)
    found = verifier.found
    if training is not None:
        verifier.verify_training(training)
        directory = store.training_directory(training)
        if (directory / "training.json").exists() and not (directory / "final").exists():
            found.notes.append(f"the weights of training {training} were removed since")
    whole = [
        TrialFile(path.relative_to(store.path).as_posix(), _hash_of(path)) for path in found.paths
    ]
    return [*whole, *(TrialFile(d.path, "", d.reason) for d in found.damaged)], found.notes


def _recorded_training(store: Store, trial: str) -> str | None:
    try:
        return str((store.result(trial) or {}).get("training") or "") or None
    except RecordDamaged:
        return None


def _hash_of(path: Path) -> str:
    """Return the hash at the end of sealed JSON, else the sha256 of the file."""
    try:
        return read_seal(path)
    except RecordDamaged:
        return seal_file(path)["sha256"]


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
    return _Verifier(store, on_progress or (lambda _: None)).verify(sweep)


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
    def __init__(self, store: Store, report: Callable[[str], None]):
        self.store, self.report = store, report
        self.found = Verification()

    def verify(self, sweep: str | None) -> Verification:
        names = [sweep] if sweep is not None else _list_names(self.store.path / "sweeps")
        if sweep is not None and not (self.store.sweep_directory(sweep) / "sweep.json").exists():
            self.store.sweep(sweep)  # raises
        for name in names:
            self.verify_sweep(name)
        trials = self.list_trials(sweep)
        trainings = self.list_trainings(sweep, trials)
        for number, trial in enumerate(trials):
            self.report(f"trial {number + 1} of {len(trials)}")
            self.verify_trial(trial)
        for number, training in enumerate(trainings):
            self.report(f"training {number + 1} of {len(trainings)}")
            self.verify_training(training)
        if sweep is None:
            for trunk in _list_names(self.store.path / "trunks"):
                self.verify_trunk(trunk)
        # a process that works meanwhile replaces files one after the other: look again
        self.found.damaged = [damage for damage in self.found.damaged if _is_damaged_still(damage)]
        return self.found

    def list_trials(self, sweep: str | None) -> list[str]:
        if sweep is None:
            return self.store.trial_ids()
        try:
            known = set(self.store.trial_ids())
            return [trial for trial in self.store.sweep_trials(sweep) if trial in known]
        except RecordDamaged:
            return []

    def list_trainings(self, sweep: str | None, trials: Sequence[str]) -> list[str]:
        names = _list_names(self.store.path / "trainings")
        if sweep is None:
            return names
        own = {self.store.read_training_id(trial) for trial in trials}
        return [name for name in names if name in own]

    def verify_sweep(self, name: str) -> None:
        directory = self.store.sweep_directory(name)
        for file, remedy in _SWEEP_FILES.items():
            content = self.check_json(directory, file, remedy)
            if file == "sweep.json" and content is not None and content["name"] != name:
                reason = f"it describes the sweep {content['name']}"
                self.add(directory, file, reason, remedy)

        for path in list_point_files(directory):
            file = f"{POINTS_FOLDER}/{path.name}"
            self.check_json(directory, file, _SWEEP_FILES["search.json"], keys=POINT_KEYS)

    def verify_trial(self, trial: str) -> None:
        directory = self.store.trial_directory(trial)
        self.found.trials += 1
        self.check_identity(directory, "trial.json", trial, "written again with the next result")
        result = self.check_identity(directory, "result.json", trial, _RUN_AGAIN)
        if result is None:
            return
        whole = (*DETAIL_FILES, "result.json")
        for name, seal in result.get("files", {}).items():
            self.check_sealed(directory, name, seal, _RUN_AGAIN, whole)
        self.note_other_weights(trial, result)
        data = (result.get("provenance") or {}).get("data") or {}
        self.found.datasets |= {data["digest"]} if "digest" in data else set()

    def note_other_weights(self, trial: str, result: dict[str, Any]) -> None:
        try:
            seal = self.store.training_seal(result["training"])
        except RecordDamaged:
            return  # reported with the training
        if seal is not None and seal != result.get("training_seal"):
            text = f"trials/{trial} was measured on weights that have been trained again since"
            self.found.notes.append(f"{text} (training {result['training']})")
        if seal is None and result.get("training_seal"):
            text = f"trials/{trial} was measured on weights whose record is gone"
            then = "they are trained again when a trial needs them"
            self.found.notes.append(f"{text} (training {result['training']}); {then}")

    def verify_training(self, training: str) -> None:
        directory = self.store.training_directory(training)
        self.found.trainings += 1
        whole = TRAINING_FILES
        record = self.check_json(directory, "training.json", _TRAIN_AGAIN, whole)
        for name, seal in (record or {}).get("files", {}).items():
            if (directory / name).exists() or name.endswith(".json"):
                self.check_sealed(directory, name, seal, _TRAIN_AGAIN, whole)
        self.check_json(directory, "diverged.json", "the training runs again")
        self.check_json(directory, "rungs.json", "measured again when a search needs them")
        self.verify_checkpoints(directory / "checkpoints", directory)

    def verify_trunk(self, trunk: str) -> None:
        directory = self.store.trunk_directory(trunk)
        self.verify_checkpoints(directory, directory)

    def verify_checkpoints(self, folder: Path, directory: Path) -> None:
        remedy = "the training resumes from the checkpoint before"
        for path in sorted(folder.glob("step-*")):
            name = path.relative_to(directory).as_posix()
            record = self.check_json(directory, f"{name}/state.json", remedy, (name,))
            for file, seal in (record or {}).get("files", {}).items():
                self.check_sealed(directory, f"{name}/{file}", seal, remedy, (name,))

    def check_identity(
        self, directory: Path, name: str, trial: str, remedy: str
    ) -> dict[str, Any] | None:
        whole = (*DETAIL_FILES, "result.json") if name == "result.json" else (name,)
        content = self.check_json(directory, name, remedy, whole)
        if content is None:
            return None
        if content["trial"] != trial:
            self.add(directory, name, f"it is of trial {content['trial']}", remedy, whole)
            return None
        return content

    def check_json(
        self,
        directory: Path,
        name: str,
        remedy: str,
        whole: tuple[str, ...] = (),
        keys: tuple[str, ...] = (),
    ) -> dict[str, Any] | None:
        """Return the content of a sealed file; None if there is none, or if it is damaged."""
        path = directory / name
        try:
            content = read_sealed_json(path, *_KEYS.get(path.name, keys))
            form = PointForm if path.parent.name == POINTS_FOLDER else _FORMS.get(path.name)
            if form is not None:
                check_form(path, content, form)
        except FileNotFoundError:
            return None
        except RecordDamaged as error:
            self.add(directory, name, _reason(error, path), remedy, whole)
            return None
        self.count(path)
        return content

    def check_sealed(
        self, directory: Path, name: str, seal: Any, remedy: str, whole: tuple[str, ...]
    ) -> None:
        path = directory / name
        try:
            check_file(path, seal)
        except RecordDamaged as error:
            self.add(directory, name, _reason(error, path), remedy, whole)
        else:
            self.count(path)

    def count(self, path: Path) -> None:
        self.found.paths.append(path)
        self.found.bytes += os.path.getsize(path)

    def add(
        self, directory: Path, name: str, reason: str, remedy: str, whole: tuple[str, ...] = ()
    ) -> None:
        path = (directory / name).relative_to(self.store.path).as_posix()
        lock = directory / "lock"
        self.found.damaged.append(Damage(path, reason, remedy, directory, whole or (name,), lock))


def heal_damage(damage: Damage) -> Path | None:
    """Move a damaged part of the record aside, and write again what can be written from the rest.

    Nothing is moved that has been made again since it was found.

    Returns:
        Where it is now; None if a process uses the directory, or drives the sweep.

    Raises:
        StoreError: the store cannot be written.
    """
    with Lock(damage.lock).hold(timeout=0.0) as fence:
        if fence is None or _is_driven(damage.directory):
            return None
        if not _is_damaged_still(damage):
            return damage.directory / "damaged"
        if not any((damage.directory / name).exists() for name in damage.names):
            return damage.directory / "damaged"  # moved with another file
        target = set_aside(damage.directory, damage.names, fence)
        if damage.names == ("trial.json",):
            _rebuild_trial(damage.directory)
        return target


def heal_description(store: Store, sweep: str) -> list[str]:
    """Move damaged files of a sweep's own directory aside, unless a driver runs the sweep.

    They are written again by a submit: what was decided follows from the results of the trials.

    Returns:
        A line for each.
    """
    verifier = _Verifier(store, lambda _: None)
    verifier.verify_sweep(sweep)
    lines = []
    for damage in verifier.found.damaged:
        aside = heal_damage(damage)
        if aside is not None:
            text = f"{damage.path} is damaged: {damage.reason}; moved to {aside}"
            lines.append(f"{text}, and written again from the results of the trials")
    return lines


def _is_damaged_still(damage: Damage) -> bool:
    """Return whether a part of the record is damaged now, by another look at its directory."""
    kind, name = damage.directory.parent.name, damage.directory.name
    again = _Verifier(Store(damage.directory.parent.parent), lambda _: None)
    {
        "sweeps": again.verify_sweep,
        "trials": again.verify_trial,
        "trainings": again.verify_training,
        "trunks": again.verify_trunk,
    }[kind](name)
    return any(found.path == damage.path for found in again.found.damaged)


def _is_driven(directory: Path) -> bool:
    return directory.parent.name == "sweeps" and Store(directory.parent.parent).is_driven(
        directory.name
    )


def _reason(error: RecordDamaged, path: Path) -> str:
    return str(error).removeprefix(f"{path} ").removeprefix("is damaged: ")


def _rebuild_trial(directory: Path) -> None:
    """Write ``trial.json`` from the result beside it, if that is whole."""
    try:
        result = read_sealed_json(directory / "result.json")
        facts = {key: result[key] for key in ("trial", "training", "seed", "experiment")}
        identity = result["provenance"]["data"]["digest"]
    except (FileNotFoundError, StoreError, KeyError, TypeError):
        return
    if facts["trial"] == directory.name:
        content = {"schema": SCHEMA, **facts, "data_identity": identity}
        write_sealed_json(directory / "trial.json", content)


def _list_names(folder: Path) -> list[str]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    return [e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name[0] != "."]
