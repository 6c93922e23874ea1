"""The folder of texts, tokens and evaluation sets: locks in it, and cached sha256 of text files.

The sha256 are cached so that planning a sweep does not read large files again.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from kvlab.errors import DataError, StoreError
from kvlab.fs.atomic_files import file_sha256, read_json, write_json
from kvlab.fs.lease import Fence
from kvlab.fs.lock import Lock

ProgressCallback = Callable[[str], None]
"""Receives lines of text for the person who waits."""


def ignore_progress(_: str) -> None:
    """A `ProgressCallback` that discards its lines."""


def get_data_dir() -> Path:
    """Return ``KVLAB_DATA``, or kvlab's folder in the platform's user cache. It may not exist."""
    configured = os.environ.get("KVLAB_DATA")
    if configured:
        return Path(configured).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("kvlab", appauthor=False)


@contextmanager
def hold_lock(path: Path, progress: ProgressCallback, work: str) -> Iterator[Fence]:
    """Hold the lock at ``path``, after waiting for other processes that hold it.

    Args:
        progress: Receives one line if another process holds the lock: who, and what ends the wait.
        work: What a holder does, such as ``prepares this text``.
    """
    lock = Lock(path)

    @cache  # called at every try, and said once
    def announce() -> None:
        progress(f"waiting: {lock.describe_wait(work)}")

    try:
        fence = lock.acquire(on_wait=announce)
    except StoreError as error:
        raise DataError(f"{error}, or set KVLAB_DATA to another folder") from None
    assert fence is not None, "acquired without a time limit"
    try:
        yield fence
    finally:
        lock.release()


# sha256 of files in it


_MIN_AGE_NANOSECONDS = 2 * 10**9
"""A file modified more recently can change again within the resolution of its time stamp."""


def cached_sha256(
    paths: list[Path], *, check: Callable[[Path], None] | None = None
) -> dict[Path, str]:
    """Return the sha256 of each file; read again only files whose `file_stamp` has changed.

    Args:
        check: Called with each file that is read. It raises if the file is not to be used.
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
    """Return size, modification time (ns) and inode of a file, which change when it does."""
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
