"""Write the record of a sweep to one file, here or at a URL, and put one into a store.

Equal records give equal bytes, so an archive can be committed beside its report. Beside an archive
at a URL lies its sha256, by which it is checked when it comes back. `kvlab.store.record_archive`
reads one.
"""

import lzma
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from kvlab.errors import CopyDamaged, CopyError, KvlabError, RecordDamaged, UsageError
from kvlab.fs.atomic_files import atomic_file, file_sha256
from kvlab.fs.lease import Fence
from kvlab.humanize import redact_url
from kvlab.store import Store
from kvlab.store.record_archive import ARCHIVE_SUFFIX, is_archive
from kvlab.store.store import TRAINING_FILES, WEIGHT_FOLDERS
from kvlab.store.store_paths import POINTS_FOLDER, list_folders
from kvlab.store.timings import TIMINGS_FILE
from kvlab.store.trial_records import RESULT_FILES
from kvlab.store.verification import heal, heal_directory

# Of each directory the file that completes it comes last.
SWEEP_FILES = (POINTS_FOLDER, "search.json", "reported.json", TIMINGS_FILE, "sweep.json")
TRIAL_FILES = ("trial.json", *RESULT_FILES)


@dataclass
class CopySummary:
    """What a copy in either direction did.

    Attributes:
        sweep: its name.
        trials, files: numbers of those that were copied.
        unchanged: number of trials that were there already.
        missing: number of trials that have not ended.
        in_use: number of trials that a process works on now.
    """

    sweep: str
    trials: int = 0
    files: int = 0
    unchanged: int = 0
    missing: int = 0
    in_use: int = 0


def write_archive(store: Store, name: str, path: Path, weights: bool = False) -> CopySummary:
    """Write the record of a sweep. Trials that have not ended are left out.

    Args:
        weights: also write the weights and checkpoints of their trainings, and those of the
            stable phase that token budgets share.

    Raises:
        RecordDamaged: A result or a file beside it is not what was written.
        UsageError: The store has no such sweep.
        StoreError: The file cannot be written.
    """
    planned = store.sweep_trials(name)
    statuses = {trial: store.status(trial) for trial in sorted(planned)}
    trials = [trial for trial, status in statuses.items() if status is not None]
    if damaged := [trial for trial in trials if statuses[trial] == "damaged"]:
        path = store.trial_directory(damaged[0]) / "result.json"
        raise RecordDamaged(f"{path} is damaged; `kvlab verify --heal` moves it aside")
    trainings = sorted(filter(None, {store.read_training_id(trial) for trial in trials}))
    trunks = sorted(filter(None, {store.read_trunk_id(trial) for trial in trials}))
    files = list(_list_files(store.sweep_directory(name), SWEEP_FILES))
    for training in trainings:
        if weights and (damage := store.check_training(training, contents=True)):
            raise RecordDamaged(f"{damage}; `kvlab verify --heal` moves it aside")
        names = TRAINING_FILES + (WEIGHT_FOLDERS if weights else ())
        files += _list_files(store.training_directory(training), names)
    for trunk in trunks if weights else ():
        steps = [f"step-{step:08d}" for step in store.trunk_steps(trunk)]
        files += _list_files(store.trunk_directory(trunk), steps)
    for trial in trials:
        files += _list_files(store.trial_directory(trial), TRIAL_FILES)
    with (
        atomic_file(path) as temporary,
        lzma.open(temporary, "wb", preset=1 if weights else 6) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in files:
            entry = tarfile.TarInfo(file.relative_to(store.path).as_posix())
            with file.open("rb") as source:  # a driver may replace the file meanwhile
                entry.size = os.fstat(source.fileno()).st_size
                archive.addfile(entry, source)
    return CopySummary(name, len(trials), len(files), missing=len(planned) - len(trials))


def _list_files(directory: Path, names: Sequence[str]) -> Iterator[Path]:
    """Iterate over files in the order of ``names``, without links and unfinished files."""
    for name in names:
        path = directory / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            is_hidden = any(part.startswith(".") for part in file.relative_to(directory).parts)
            if file.is_file() and not file.is_symlink() and not is_hidden:
                yield file


# Into a store


def restore_archive(store: Store, archive: Store) -> CopySummary:
    """Put the record of an archive into ``store``, which may hold some of it.

    What the store has stays: trials that have ended, weights, and the description, which may be
    newer. Only what is damaged there is moved aside and replaced. What a process works on now is
    not touched.

    Args:
        archive: see `extract_archive`.

    Raises:
        UsageError: a driver runs the sweep now.
        CopyDamaged: weights in the archive are not what was written.
        StoreError: the store cannot be written.
    """
    [name] = archive.sweep_names()
    summary = CopySummary(name)
    directory = store.sweep_directory(name)
    if store.is_driven(name):
        text = f"sweep = {name} is being run in {store.path}"
        raise UsageError(f"{text}; wait for it, or end it with `kvlab stop {name}`")
    heal(directory)
    with store.driver_lock(name).hold():
        missing = [file for file in SWEEP_FILES if not (directory / file).exists()]
        summary.files += _put_files(archive, directory, missing)
        for trunk in list_folders(archive.path / "trunks"):
            target = store.trunk_directory(trunk.name)
            with store.trunk_lock(trunk.name).hold(timeout=0.0) as fence:
                steps = [step.name for step in list_folders(trunk) if fence is not None]
                missing = [step for step in steps if not (target / step).exists()]
                summary.files += _put_files(archive, target, missing, fence)
        for trial in store.sweep_trials(name):
            _restore_trial(store, archive, trial, summary)
    return summary


def _restore_trial(store: Store, archive: Store, trial: str, summary: CopySummary) -> None:
    """Put a trial that has ended in the archive into the store, after its training."""
    if store.status(trial) not in (None, "damaged"):
        summary.unchanged += 1
    elif archive.status(trial) in (None, "damaged"):
        summary.missing += 1
        return
    else:
        with store.trial_lock(trial).hold(timeout=0.0) as fence:
            if fence is None:
                summary.in_use += 1
                return
            target = store.trial_directory(trial)
            heal_directory(target, fence)
            summary.files += _put_files(archive, target, TRIAL_FILES, fence)
            summary.trials += 1
    training = archive.read_training_id(trial)
    if not training:
        return
    directory = store.training_directory(training)
    if store.is_trained(training) and not store.check_training(training, contents=True):
        return
    with store.training_lock(training).hold(timeout=0.0) as fence:
        if fence is None:
            return
        heal_directory(directory, fence)
        names = (*WEIGHT_FOLDERS, *TRAINING_FILES)
        summary.files += _put_files(archive, directory, names, fence)
        if damage := store.check_training(training, contents=True):
            heal_directory(directory, fence)
            raise CopyDamaged(f"{damage}, as in the archive; copy it again from its store")


def _put_files(
    archive: Store, target: Path, names: Sequence[str], fence: Fence | None = None
) -> int:
    """Copy what differs, each file atomically and in order; return how many files that were."""
    count, source = 0, archive.path / target.parent.name / target.name
    for file in _list_files(source, names):
        path = target / file.relative_to(source)
        if not path.parent.resolve().is_relative_to(target.resolve()):
            text = f"{path} lies outside of {target}, behind a symbolic link"
            raise CopyError(f"{text}; remove the link, then copy again")
        if path.is_file() and file_sha256(path) == file_sha256(file):
            continue
        with atomic_file(path, fence=fence) as temporary:
            shutil.copyfile(file, temporary)
        count += 1
    return count


# At a URL


def copy_sweep(store: Store, name: str, place: str, weights: bool = False) -> CopySummary:
    """Write the archive of a sweep to a place.

    Args:
        place: a file or a folder of this machine, or a URL that fsspec opens, such as
            ``s3://bucket/kvlab``. A folder gets ``<sweep>.tar.xz``; a URL its sha256 beside it.
        weights: see `write_archive`.

    Raises:
        CopyError: the URL cannot be reached or refuses.
        UsageError, RecordDamaged, StoreError: see `write_archive`.
    """
    place = archive_at(place, name)
    if "://" not in place:
        return write_archive(store, name, Path(place), weights)
    with tempfile.TemporaryDirectory() as folder, _open_url(place) as (fs, target):
        path = Path(folder, name + ARCHIVE_SUFFIX)
        summary = write_archive(store, name, path, weights)
        fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        fs.put_file(str(path), f"{target}.part")  # an outage leaves the earlier archive whole
        fs.mv(f"{target}.part", target)
        line = f"{file_sha256(path)}  {target.rpartition('/')[2]}\n"  # as of sha256sum
        fs.pipe_file(f"{target}.sha256", line.encode())
    return summary


def fetch_archive(place: str, folder: Path) -> Path:
    """Return the path of an archive, which is fetched into ``folder`` if it lies at a URL.

    Raises:
        CopyDamaged: the file there does not have the sha256 beside it.
        CopyError: the URL cannot be reached, or has no such file.
    """
    if "://" not in place:
        return Path(place)
    path = folder / "fetched"
    with _open_url(place) as (fs, target):
        expected = b""
        if all(fs.info(one)["type"] == "file" for one in (target, f"{target}.sha256")):
            expected = fs.cat_file(f"{target}.sha256", start=0, end=64)
            fs.get_file(target, str(path))
        if not expected or expected != file_sha256(path).encode():
            text = f"{redact_url(place)} does not have the sha256 that is written beside it"
            raise CopyDamaged(f"{text}; copy it again from a store that has the sweep")
    return path


def list_archives(place: str) -> list[str]:
    """Return the archives in a folder or at a URL.

    Raises:
        CopyError: the URL cannot be reached.
    """
    with _open_url(place) as (fs, folder):
        names = (
            str(path).rpartition("/")[2] for path in fs.glob(f"{escape(folder)}/*{ARCHIVE_SUFFIX}")
        )
        return [archive_at(place, name.removesuffix(ARCHIVE_SUFFIX)) for name in sorted(names)]


def archive_at(place: str, name: str) -> str:
    """Return where a sweep's archive lies: ``place`` itself, or in that folder."""
    return place if is_archive(place) else f"{place.rstrip('/')}/{name}{ARCHIVE_SUFFIX}"


def check_place(place: str, store: Store) -> None:
    """Check where archives shall go before anything runs.

    Raises:
        UsageError: no file system is known or installed for the URL, or it lies in the store.
    """
    with _open_url(place) as (fs, path):
        protocols = fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)
        if "file" in protocols and Path(path).resolve().is_relative_to(store.path.resolve()):
            text = f"{redact_url(place)} lies in the store {store.path}"
            raise UsageError(f"{text}; a copy there would be lost with it, so name another place")


@contextmanager
def _open_url(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system and the path of a URL, or raise CopyError for any error of theirs.

    Raises:
        UsageError: no file system is known or installed for the URL.
    """
    import fsspec

    try:
        try:
            fs, path = fsspec.core.url_to_fs(url)  # some connect here
        except (ImportError, ValueError, TypeError) as error:
            text = f"{redact_url(url)} cannot be opened: {error}"
            raise UsageError(f"{text}; install what it names, or use another URL") from None
        fs.invalidate_cache()
        yield fs, path.rstrip("/")
    except KvlabError:
        raise
    except Exception as error:  # each file system has classes of its own
        line = (str(error).splitlines() or [""])[0]
        text = f"{redact_url(url)} cannot be used: {type(error).__name__}: {line}"
        raise CopyError(f"{text}; check it, then run `kvlab copy`") from None
