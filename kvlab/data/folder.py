"""Where kvlab keeps text, tokens and evaluation sets, and the lock on making one of them."""

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.errors import DataError

Progress = Callable[[str], None]
"""Takes one line of text for the person who waits."""

_POLL_SECONDS = 0.1


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
def exclusive(path: Path, progress: Progress, waiting: str) -> Iterator[None]:
    """Holds the lock file ``path``; others wait, and the system frees it when its holder dies.

    Raises:
        DataError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        text = f"{path.parent} cannot be written ({error.strerror})"
        raise DataError(f"{text}; set KVLAB_DATA to a folder that can") from None
    try:
        told = False
        while not _locked(handle):
            if not told:
                progress(waiting)
                told = True
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
