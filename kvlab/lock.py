"""Locks on files, held until released or until the process dies, however it dies.

They are ``flock`` locks: the operating system drops them with the process, so there is no stale
lock to clean up, and two processes on one file system never hold the same one. A process that
is forked without exec inherits the lock; kvlab's own never do.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.errors import StoreError

POLL_SECONDS = 0.1


class Lock:
    """An exclusive lock on one file, which is made where it is missing and never removed."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._handle: int | None = None

    def acquire(
        self, patience: float | None = None, on_wait: Callable[[], None] | None = None
    ) -> bool:
        """Takes the lock; True if it is ours now.

        Args:
            patience: seconds to try for; None tries for ever.
            on_wait: called at every try that failed; what it raises ends the waiting.

        Raises:
            StoreError: the file cannot be made, or the file system has no locks.
        """
        assert self._handle is None, "this lock is already held"
        handle = _open(self.path, os.O_RDWR | os.O_CREAT)
        try:
            started = time.monotonic()
            while not _try(handle, fcntl.LOCK_EX, self.path):
                if patience is not None and time.monotonic() - started >= patience:
                    return False
                if on_wait is not None:
                    on_wait()
                time.sleep(POLL_SECONDS)
            self._handle, handle = handle, -1
            return True
        finally:
            if handle >= 0:
                os.close(handle)

    def note(self, text: str) -> None:
        """Writes into the locked file who holds it."""
        assert self._handle is not None, "only the holder writes"
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, text.encode(), 0)
        except OSError as error:
            raise StoreError(_unlockable(self.path, error)) from None

    def noted(self) -> str:
        """What the holder has written, if anything."""
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                return file.read(200).strip()
        except OSError:
            return ""

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    @contextmanager
    def hold(
        self, patience: float | None = None, on_wait: Callable[[], None] | None = None
    ) -> Iterator[bool]:
        """`acquire` for a ``with`` block; gives whether it is ours, and releases at the end."""
        try:
            yield self.acquire(patience, on_wait)
        finally:
            self.release()


def is_held(path: str | Path) -> bool:
    """Whether some process holds the lock on ``path`` now."""
    if not os.path.exists(path):
        return False
    handle = _open(Path(path), os.O_RDONLY)
    try:
        # Shared, and let go at once: a holder-to-be that meets it tries again.
        return not _try(handle, fcntl.LOCK_SH, Path(path))
    finally:
        os.close(handle)


def _open(path: Path, flags: int) -> int:
    try:
        if flags & os.O_CREAT:
            path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)
    except OSError as error:
        raise StoreError(_unlockable(path, error)) from None


def _unlockable(path: Path, error: OSError) -> str:
    return f"{path} cannot be locked: {error.strerror}; check the folder's rights and the disk"


def _try(handle: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        text = f"{path} cannot be locked ({error.strerror}): the file system has no locks"
        raise StoreError(f"{text}; put the store on one that has them") from None
