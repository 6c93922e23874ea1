"""Where kvlab keeps text, tokens and evaluation sets, and the lock on making one of them."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.errors import DataError, StoreError
from kvlab.fs.lock import Lock

ProgressCallback = Callable[[str], None]
"""Takes one line of text for the person who waits."""


def ignore_progress(_: str) -> None:
    """A `Progress` for when nobody waits."""


def get_data_dir() -> Path:
    """``KVLAB_DATA``, or the platform's user cache folder. It may not exist yet."""
    chosen = os.environ.get("KVLAB_DATA")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvlab"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvlab"


@contextmanager
def hold_lock(
    path: Path, progress: ProgressCallback, waiting: str, guards: Path | None = None
) -> Iterator[None]:
    """Holds the lock ``path``; others wait. See `kvlab.fs.lock.Lock`, also for ``guards``.

    Raises:
        DataError: the folder cannot be written.
    """
    lock, told = Lock(path, guards), False

    def tell() -> None:
        nonlocal told
        if not told:
            progress(waiting)
        told = True

    try:
        lock.acquire(on_wait=tell)
    except StoreError as error:
        raise DataError(f"{error}, or set KVLAB_DATA to another folder") from None
    try:
        yield
    finally:
        lock.release()
