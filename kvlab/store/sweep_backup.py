"""Sweeps to object storage and back: which directories belong to one, and in which order."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from kvlab.errors import CopyDamaged, StoreError, UsageError
from kvlab.fs.atomic_files import read_json
from kvlab.spec.spec_model import NAME_PATTERN
from kvlab.store.object_storage import ObjectStorage
from kvlab.store.store import Store

# What completes a directory comes last.
SWEEP_FILES = ("search.json", "sweep.json")
TRAINING_FILES = (
    "config.json", "start.json", "rungs.json", "checkpoints", "final", "diverged.json",
    "training.json",
)  # fmt: skip
TRIAL_FILES = ("trial.json", "attempts", "items.jsonl.gz", "result.json")


@dataclass
class BackupSummary:
    """What a copying did: trials and files that it copied, trials that were there or have not
    ended, those that some process works on now, and what is damaged there, each with the reason."""

    sweep: str
    trials: int = 0
    files: int = 0
    unchanged: int = 0
    missing: int = 0
    in_use: int = 0
    damaged: list[str] = field(default_factory=list)


def check_outside_store(copies: ObjectStorage, store: Store) -> None:
    """Raises UsageError if the copies would lie in the store itself."""
    folder = copies.folder
    if folder is not None and folder.resolve().is_relative_to(store.path.resolve()):
        text = f"{copies.shown} lies in the store {store.path}"
        raise UsageError(f"{text}; a copy there would go with it, so name another place")


def copy_sweep(
    store: Store, copies: ObjectStorage, name: str, *, known: set[str] | None = None
) -> BackupSummary:
    """Copies a sweep's description, the trials that have ended, and their trainings.

    Args:
        known: ids of trials that need not be looked at again.

    Raises:
        CopyError: the place cannot be reached or refuses.
    """
    copied = BackupSummary(name)
    for trial in store.sweep_trials(name):
        if known is not None and trial in known:
            copied.unchanged += 1
        elif store.status(trial) in (None, "damaged"):
            copied.missing += 1
        else:
            files = copy_trial(store, copies, trial)
            copied.files += files
            copied.trials += bool(files)
            copied.unchanged += not files
    copied.files += copy_description(store, copies, name)
    return copied


def copy_trial(store: Store, copies: ObjectStorage, trial: str) -> int:
    """Copies one trial that has ended, its training first; returns how many files were new."""
    training = _read_training_id(store, trial)
    files = 0
    if training:
        directory = store.training_directory(training)
        files += copies.put(directory, f"trainings/{training}", TRAINING_FILES)
    return files + copies.put(store.trial_directory(trial), f"trials/{trial}", TRIAL_FILES)


def copy_description(store: Store, copies: ObjectStorage, name: str) -> int:
    """Copies what was asked and, of a search, its history; returns how many files were new."""
    return copies.put(store.sweep_directory(name), f"sweeps/{name}", SWEEP_FILES)


def list_copied_sweeps(copies: ObjectStorage) -> list[str]:
    """Names of the sweeps that were copied."""
    return [name for name in copies.names("sweeps") if re.match(NAME_PATTERN, name)]


def restore_sweep(store: Store, copies: ObjectStorage, name: str) -> BackupSummary:
    """Brings a sweep back into ``store``, which may hold some of it.

    What the store has stays: a trial that has ended there, weights that are there, a description
    (which may be a newer one). Nothing that some process works on now is touched. A trial whose
    copy is damaged is left out, and the others come.

    Raises:
        UsageError: there is no copy of this sweep.
        CopyError: the place cannot be reached, or the description there is damaged.
        StoreError: the store cannot be written.
    """
    copied = BackupSummary(name)
    directory = store.sweep_directory(name)
    if store.is_driven(name):
        text = f"sweep = {name} is being run in {store.path}"
        raise UsageError(f"{text}; wait for it, or end it with `kvlab stop {name}`")
    with store.driver_lock(name).hold():
        if not (directory / "sweep.json").exists():
            files = copies.get(f"sweeps/{name}", directory)
            if not files:
                known = ", ".join(list_copied_sweeps(copies)) or "it has none"
                text = f"sweep = {name} is not in {copies.shown} ({known})"
                raise UsageError(f"{text}; `kvlab copy --to` puts it there")
            copied.files += files
        for trial in store.sweep_trials(name):
            try:
                _restore_trial(store, copies, trial, copied)
            except CopyDamaged as error:
                copied.damaged.append(str(error))
    return copied


def _restore_trial(store: Store, copies: ObjectStorage, trial: str, copied: BackupSummary) -> None:
    if store.status(trial) not in (None, "damaged"):
        copied.unchanged += 1
        _restore_training(store, copies, trial, copied)
        return
    with store.trial_lock(trial).hold(timeout=0.0) as fence:
        if fence is None:
            copied.in_use += 1
            return
        files = copies.get(f"trials/{trial}", store.trial_directory(trial), fence)
        copied.files += files or 0
        if store.status(trial) is None:
            copied.missing += 1
            return
        copied.trials += 1
    _restore_training(store, copies, trial, copied)


def _restore_training(
    store: Store, copies: ObjectStorage, trial: str, copied: BackupSummary
) -> None:
    training = _read_training_id(store, trial)
    if not training or store.is_trained(training):
        return
    with store.training_lock(training).hold(timeout=0.0) as fence:
        if fence is not None:
            place = f"trainings/{training}"
            copied.files += copies.get(place, store.training_directory(training), fence) or 0


def _read_training_id(store: Store, trial: str) -> str:
    path: Path = store.trial_directory(trial) / "trial.json"
    try:
        return str(read_json(path)["training"])
    except (FileNotFoundError, StoreError, KeyError, TypeError):
        return ""
