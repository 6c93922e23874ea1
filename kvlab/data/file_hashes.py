"""sha256 of files, remembered, so that large text is read once and not at every plan."""

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from kvlab.data.data_dir import get_data_dir
from kvlab.errors import DataError, StoreError
from kvlab.fs.atomic_files import read_json, write_json

_MIN_AGE_NANOSECONDS = 2 * 10**9
"""A file changed this lately may change again without its time moving: not remembered."""


def file_sha256(path: str | Path) -> str:
    """64 hex digits of the bytes of one file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None


def cached_sha256(paths: list[Path]) -> dict[Path, str]:
    """`file_sha256` of each, from memory where size, time and inode are as they were."""
    memory_path = get_data_dir() / "digests.json"
    memory = _read_cache(memory_path)
    digests: dict[Path, str] = {}
    learnt = {}
    for path in paths:
        stamp = file_stamp(path)
        known = memory.get(str(path))
        if isinstance(known, list) and known[:-1] == stamp:
            digests[path] = str(known[-1])
            continue
        digests[path] = file_sha256(path)
        if time.time_ns() - stamp[1] > _MIN_AGE_NANOSECONDS and file_stamp(path) == stamp:
            learnt[str(path)] = [*stamp, digests[path]]
    if learnt:
        with suppress(StoreError):  # a folder that cannot be written only costs the memory
            write_json(memory_path, {**_read_cache(memory_path), **learnt})
    return digests


def file_stamp(path: Path) -> list[int]:
    """What changes when the file does: size, time, inode.

    Raises:
        DataError: the file is gone.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _read_cache(path: Path) -> dict[str, object]:
    try:
        memory = read_json(path)
    except (FileNotFoundError, StoreError):
        return {}
    return memory if isinstance(memory, dict) else {}
