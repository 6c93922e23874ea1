"""Copy sweeps to object storage and back: which directories, which files, in which order."""

import re
import shutil
from dataclasses import dataclass, field

from kvlab.errors import CopyDamaged, RecordDamaged, UsageError
from kvlab.fs.atomic_files import replace_file
from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import set_aside
from kvlab.spec.spec_model import NAME_PATTERN
from kvlab.store.object_storage import ObjectStorage
from kvlab.store.store import Store
from kvlab.store.store_paths import POINTS_FOLDER
from kvlab.store.timings import TIMINGS_FILE
from kvlab.store.trial_records import DETAIL_FILES

# Of each directory the file that completes it comes last.
SWEEP_FILES = (POINTS_FOLDER, "search.json", "reported.json", TIMINGS_FILE, "sweep.json")
TRAINING_FILES = (
    "config.json", "start.json", "rungs.json", "checkpoints", "final", "diverged.json",
    "training.json",
)  # fmt: skip
TRIAL_FILES = ("trial.json", "attempts", *DETAIL_FILES, "result.json")


@dataclass
class BackupSummary:
    """What a copy in either direction did.

    Attributes:
        sweep: its name.
        trials, files: numbers of those that were copied.
        unchanged: number of trials that were there already.
        missing: number of trials that have not ended.
        in_use: number of trials that a process works on now.
        damaged: why trials were left out, one line each.
    """

    sweep: str
    trials: int = 0
    files: int = 0
    unchanged: int = 0
    missing: int = 0
    in_use: int = 0
    damaged: list[str] = field(default_factory=list)


def check_outside_store(storage: ObjectStorage, store: Store) -> None:
    """Raise UsageError if the storage lies in the store itself."""
    folder = storage.folder
    if folder is not None and folder.resolve().is_relative_to(store.path.resolve()):
        text = f"{storage.url} lies in the store {store.path}"
        raise UsageError(f"{text}; a copy there would be lost with it, so name another place")


def copy_sweep(
    store: Store, storage: ObjectStorage, name: str, *, skip: set[str] | None = None
) -> BackupSummary:
    """Copy a sweep's description, the trials that have ended, and their trainings.

    Args:
        skip: ids of trials that are known to be copied.

    Raises:
        CopyError: the storage cannot be reached or refuses.
    """
    summary = BackupSummary(name)
    for trial in store.sweep_trials(name):
        if skip is not None and trial in skip:
            summary.unchanged += 1
        elif store.status(trial) in (None, "damaged"):
            summary.missing += 1
        else:
            try:
                files = copy_trial(store, storage, trial)
            except RecordDamaged as error:
                summary.damaged.append(str(error))
                continue
            summary.files += files
            summary.trials += bool(files)
            summary.unchanged += not files
    summary.files += copy_description(store, storage, name)
    return summary


def copy_trial(store: Store, storage: ObjectStorage, trial: str) -> int:
    """Copy one trial that has ended, after its training and the stable phase that it shares.

    Returns:
        How many files were new.

    Raises:
        RecordDamaged: the training is not what was written; nothing of it is copied.
        CopyError: the storage cannot be reached or refuses.
    """
    training, trunk = store.read_training_id(trial), store.read_trunk_id(trial)
    files = 0
    if training:
        directory, seals = store.training_directory(training), store.training_seals(training)
        files += storage.upload(directory, f"trainings/{training}", TRAINING_FILES, seals)
    if trunk:
        files += _copy_trunk(store, storage, trunk)
    return files + storage.upload(store.trial_directory(trial), f"trials/{trial}", TRIAL_FILES)


def _copy_trunk(store: Store, storage: ObjectStorage, trunk: str) -> int:
    """Copy the whole checkpoints of a stable phase; return how many files were new."""
    directory, names = store.trunk_directory(trunk), list[str]()
    for folder in sorted(directory.glob("step-*")):
        try:
            seals = store.check_checkpoint(folder)
        except RecordDamaged:
            continue  # `kvlab verify` names it; a training takes these steps itself
        names += [f"{folder.name}/{name}" for name in (*seals, "state.json")]
    return storage.upload(directory, f"trunks/{trunk}", names) if names else 0


def copy_description(store: Store, storage: ObjectStorage, name: str) -> int:
    """Copy a sweep's description and the history of a search; return how many files were new."""
    return storage.upload(store.sweep_directory(name), f"sweeps/{name}", SWEEP_FILES)


def list_copied_sweeps(storage: ObjectStorage) -> list[str]:
    """Return the names of the sweeps that were copied."""
    return [name for name in storage.list_names("sweeps") if re.fullmatch(NAME_PATTERN, name)]


def restore_sweep(store: Store, storage: ObjectStorage, name: str) -> BackupSummary:
    """Copy a sweep back into ``store``, which may hold some of it.

    What the store has stays: trials that have ended, weights, and the description, which may be
    newer. Only what is damaged there is moved aside and fetched. What a process works on now is
    not touched. A trial whose copy is damaged is left out.

    Raises:
        UsageError: there is no copy of this sweep, or a driver runs it now.
        CopyError: the storage cannot be reached, or the description there is damaged.
        StoreError: the store cannot be written.
    """
    summary = BackupSummary(name)
    directory = store.sweep_directory(name)
    if store.is_driven(name):
        text = f"sweep = {name} is being run in {store.path}"
        raise UsageError(f"{text}; wait for it, or end it with `kvlab stop {name}`")
    with store.driver_lock(name).hold():
        if not _is_described(store, name):
            files = storage.download(f"sweeps/{name}", directory)
            if not files:
                names = ", ".join(list_copied_sweeps(storage)) or "it has none"
                text = f"sweep = {name} is not in {storage.url} ({names})"
                raise UsageError(f"{text}; `kvlab copy --to` puts it there")
            summary.files += files
        for trial in store.sweep_trials(name):
            try:
                _restore_trial(store, storage, trial, summary)
            except CopyDamaged as error:
                summary.damaged.append(str(error))
        if summary.missing or summary.damaged:
            trunks = {store.read_trunk_id(trial) for trial in store.sweep_trials(name)}
            for trunk in sorted(filter(None, trunks)):
                _restore_trunk(store, storage, trunk, summary)
    return summary


def _restore_trunk(
    store: Store, storage: ObjectStorage, trunk: str, summary: BackupSummary
) -> None:
    """Fetch the checkpoints of a stable phase that the store lacks, each put in place whole."""
    directory = store.trunk_directory(trunk)
    fetched = directory / ".fetched"
    with store.trunk_lock(trunk).hold(timeout=0.0) as fence:
        if fence is None:
            return
        try:
            summary.files += storage.download(f"trunks/{trunk}", fetched, fence) or 0
            for folder in sorted(fetched.glob("step-*")):
                store.check_checkpoint(folder)
                if not (directory / folder.name).exists():
                    replace_file(folder, directory / folder.name, fence)
        except (CopyDamaged, RecordDamaged) as error:
            summary.damaged.append(str(error))
        shutil.rmtree(fetched, ignore_errors=True)


def _restore_trial(
    store: Store, storage: ObjectStorage, trial: str, summary: BackupSummary
) -> None:
    if store.status(trial) not in (None, "damaged"):
        summary.unchanged += 1
        _restore_training(store, storage, trial, summary)
        return
    with store.trial_lock(trial).hold(timeout=0.0) as fence:
        if fence is None:
            summary.in_use += 1
            return
        if store.status(trial) == "damaged":
            store.set_aside_result(trial, fence)
        files = storage.download(f"trials/{trial}", store.trial_directory(trial), fence)
        summary.files += files or 0
        if store.status(trial) in (None, "damaged"):
            summary.missing += 1
            return
        summary.trials += 1
    _restore_training(store, storage, trial, summary)


def _restore_training(
    store: Store, storage: ObjectStorage, trial: str, summary: BackupSummary
) -> None:
    training = store.read_training_id(trial)
    if not training:
        return
    is_damaged = store.check_training(training, contents=True) is not None
    if store.is_trained(training) and not is_damaged:
        return
    with store.training_lock(training).hold(timeout=0.0) as fence:
        if fence is None:
            return
        if store.check_training(training, contents=True) is not None:
            store.set_aside_training(training, fence)
        summary.files += fetch_training(store, storage, training, fence)


def fetch_training(store: Store, storage: ObjectStorage, training: str, fence: Fence) -> int:
    """Copy a training back, and check it. What is damaged in the store has been moved aside.

    Args:
        fence: of the training's lock.

    Returns:
        How many files were fetched.

    Raises:
        CopyDamaged: it is damaged there, too.
        CopyError: the storage cannot be reached.
        StoreError: the store cannot be written.
    """
    directory = store.training_directory(training)
    files = storage.download(f"trainings/{training}", directory, fence) or 0
    damage = store.check_training(training, contents=True)
    if damage is not None:
        store.set_aside_training(training, fence)
        raise CopyDamaged(f"{damage}, as in the copy")
    return files


def _is_described(store: Store, name: str) -> bool:
    """Return whether the store has the description of a sweep; move a damaged one aside."""
    try:
        store.sweep(name)
    except RecordDamaged:
        set_aside(store.sweep_directory(name), ["sweep.json"])
        return False
    except UsageError:
        return False
    return True
