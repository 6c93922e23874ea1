"""sha256 of text files, cached so that planning a sweep does not read large files again."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvlab.data.data_dir import get_data_dir
from kvlab.errors import DataError, StoreError
from kvlab.fs.atomic_files import file_sha256, read_json, write_json

_MIN_AGE_NANOSECONDS = 2 * 10**9
"""A file modified more recently can change again within the resolution of its time stamp."""


def cached_sha256(
    paths: list[Path], *, check: Callable[[Path], None] | None = None
) -> dict[Path, str]:
    """Return the sha256 of each file; read again only files whose `file_stamp` has changed.

    Args:
        check: Called with each file that is read. It raises if the file is not to be used.

    Raises:
        DataError: A file cannot be read.
    """
    cache_path = get_data_dir() / "digests.json"
    cache = _read_cache(cache_path)
    digests: dict[Path, str] = {}
    new_entries = {}
    for path in paths:
        stamp = file_stamp(path)
        entry = cache.get(str(path))
        if isinstance(entry, list) and entry[:-1] == stamp:
            digests[path] = str(entry[-1])
            continue
        if check is not None:
            check(path)
        try:
            digests[path] = file_sha256(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror})") from None
        if time.time_ns() - stamp[1] > _MIN_AGE_NANOSECONDS and file_stamp(path) == stamp:
            new_entries[str(path)] = [*stamp, digests[path]]
    if new_entries:
        with suppress(StoreError):  # a read-only data folder costs the cache alone
            write_json(cache_path, {**_read_cache(cache_path), **new_entries})
    return digests


def file_stamp(path: Path) -> list[int]:
    """Return size, modification time (ns) and inode of a file, which change when it does.

    Raises:
        DataError: The file is missing.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _read_cache(path: Path) -> dict[str, object]:
    try:
        cache = read_json(path)
    except (FileNotFoundError, StoreError):
        return {}
    return cache if isinstance(cache, dict) else {}
