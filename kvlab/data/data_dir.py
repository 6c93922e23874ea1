"""The folder of texts, tokens and evaluation sets, and locks in it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.errors import DataError, StoreError
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

    Raises:
        DataError: The folder cannot be written.
    """
    lock, announced = Lock(path), False

    def announce() -> None:
        nonlocal announced
        if not announced:
            progress(f"waiting: {lock.describe_wait(work)}")
        announced = True

    try:
        fence = lock.acquire(on_wait=announce)
    except StoreError as error:
        raise DataError(f"{error}, or set KVLAB_DATA to another folder") from None
    assert fence is not None, "acquired without a time limit"
    try:
        yield fence
    finally:
        lock.release()
