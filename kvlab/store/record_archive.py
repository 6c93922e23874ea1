"""The record of one sweep in one file: all that a report is made from, and no weights.

A ``.tar.xz`` with the names of a store: ``sweeps/<name>/``, ``trials/<id>/``, ``trainings/<id>/``.
Equal records give equal bytes, so an archive can be committed beside its report.
"""

import lzma
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from kvlab.errors import RecordDamaged, StoreError
from kvlab.fs.atomic_files import MAX_JSON_BYTES, atomic_file, write_atomic
from kvlab.store.store import Store
from kvlab.store.store_paths import POINTS_FOLDER
from kvlab.store.sweep_backup import SWEEP_FILES, BackupSummary
from kvlab.store.trial_records import DETAIL_FILES

ARCHIVE_SUFFIX = ".tar.xz"

TRAINING_FILES = ("config.json", "start.json", "rungs.json", "diverged.json", "training.json")
TRIAL_FILES = ("trial.json", *DETAIL_FILES, "result.json")

_MAX_EXPANSION = 1000  # records shrink 10 to 30 times
_ID = "[0-9a-f]{16}"
_FILE = "[a-z]+([.][a-z]+)*"
_NAME = re.compile(
    rf"(trials/{_ID}/{_FILE}|trainings/{_ID}/{_FILE}"
    rf"|sweeps/[A-Za-z0-9][A-Za-z0-9._-]*/({POINTS_FOLDER}/[a-z]+[0-9]*[.]json|{_FILE}))\Z"
)


def is_archive(path: str | Path) -> bool:
    """Return whether a path is named as an archive is."""
    return str(path).endswith(ARCHIVE_SUFFIX)


def write_archive(store: Store, name: str, path: Path) -> BackupSummary:
    """Write the record of a sweep. Trials that have not ended are left out.

    Raises:
        RecordDamaged: A result or a file beside it is not what was written.
        UsageError: The store has no such sweep.
        StoreError: The file cannot be written.
    """
    planned = store.sweep_trials(name)
    trials = [trial for trial in planned if _has_ended(store, trial)]
    trainings = sorted(filter(None, {store.read_training_id(trial) for trial in trials}))
    files = [
        *_list_files(store.sweep_directory(name), SWEEP_FILES),
        *(
            file
            for training in trainings
            for file in _list_files(store.training_directory(training), TRAINING_FILES)
        ),
        *(
            file
            for trial in sorted(trials)
            for file in _list_files(store.trial_directory(trial), TRIAL_FILES)
        ),
    ]
    with (
        atomic_file(path) as temporary,
        lzma.open(temporary, "wb", preset=6) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for file in files:
            entry = tarfile.TarInfo(file.relative_to(store.path).as_posix())
            entry.size = file.stat().st_size
            with file.open("rb") as source:
                archive.addfile(entry, source)
    return BackupSummary(name, len(trials), len(files), missing=len(planned) - len(trials))


def extract_archive(path: Path, folder: Path) -> Store:
    """Return a store in ``folder``, which is empty, with the record of an archive.

    Raises:
        StoreError: The file is no archive that `write_archive` has written, or is cut off.
    """
    if path.exists() and not path.is_file():
        raise _no_archive(path, "it is no regular file")
    total = 0
    try:
        most = _MAX_EXPANSION * path.stat().st_size
        with lzma.open(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for entry in archive:
                total += entry.size
                if not entry.isreg() or not _NAME.match(entry.name):
                    raise _no_archive(path, f"it holds {entry.name!r}")
                if entry.size > MAX_JSON_BYTES or total > most:
                    raise _no_archive(path, f"{entry.name} is too large")
                source = archive.extractfile(entry)
                assert source is not None, "a regular file has contents"
                write_atomic(folder / entry.name, source.read())
    except (lzma.LZMAError, tarfile.TarError, EOFError, ValueError) as error:
        raise _no_archive(path, str(error)) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from None
    store = Store(folder)
    if len(store.sweep_names()) != 1:
        raise _no_archive(path, f"it describes {len(store.sweep_names())} sweeps")
    return store


def _no_archive(path: Path, reason: str) -> StoreError:
    text = f"{path} is not the record of a sweep: {reason}"
    return StoreError(f"{text}; `kvlab copy SWEEP --to FILE{ARCHIVE_SUFFIX}` writes one")


def _has_ended(store: Store, trial: str) -> bool:
    status = store.status(trial)
    if status == "damaged":
        path = store.trial_directory(trial) / "result.json"
        raise RecordDamaged(f"{path} is damaged; `kvlab verify --heal` moves it aside")
    return status is not None


def _list_files(directory: Path, names: tuple[str, ...]) -> Iterator[Path]:
    for name in names:
        path = directory / name
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file() and not file.is_symlink() and not file.name.startswith("."):
                yield file
