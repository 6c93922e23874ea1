"""Where kvlab keeps text, tokens and evaluation sets, and the lock on making one of them."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.errors import DataError, StoreError
from kvlab.lock import Lock

Progress = Callable[[str], None]
"""Takes one line of text for the person who waits."""


def silent(_: str) -> None:
    """A `Progress` for when nobody waits."""


def data_folder() -> Path:
    """``KVLAB_DATA``, or the platform's user cache folder. It may not exist yet."""
    chosen = os.environ.get("KVLAB_DATA")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvlab"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvlab"


@contextmanager
def exclusive(
    path: Path, progress: Progress, waiting: str, guards: Path | None = None
) -> Iterator[None]:
    """Holds the lock ``path``; others wait. See `kvlab.lock.Lock`, also for ``guards``.

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
