"""Locks on files, held until released, or until the process dies or falls silent.

They are the leases of `kvlab.fs.lease`, renewed by one thread of the process. Where a lock guards a
folder, whoever has lost it is kept from putting anything more in place there (`kvlab.fs.atomic_files`).
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.errors import StoreError
from kvlab.fs import atomic_files, lease
from kvlab.fs.lease import Fence

POLL_SECONDS = 0.1
HEARTBEATS_PER_LEASE = 10
"""Heartbeats in the time after which a silent holder is given up."""

GRACE_SECONDS = 300.0
"""By so much more a lease must be silent, by the files' times, for one that asks only once."""


class Lock:
    """An exclusive lock at a path; the files that say so stand beside it.

    Args:
        path: of the lock.
        guards: the folder whose files only the holder may put in place.
        own: the path is this process's own, and nothing stays there when it lets go.
    """

    def __init__(self, path: str | Path, guards: str | Path | None = None, *, own: bool = False):
        self.path, self._guards, self._own = Path(path), guards, own
        self._fence: Fence | None = None

    def acquire(
        self, patience: float | None = None, on_wait: Callable[[], None] | None = None
    ) -> bool:
        """Takes the lock; True if it is ours now.

        Args:
            patience: seconds to try for; None tries for ever.
            on_wait: called at every try that failed; what it raises ends the waiting.

        Raises:
            StoreError: the file cannot be made.
        """
        assert self._fence is None, "this lock is already held"
        started = time.monotonic()
        while (fence := self._try()) is None:
            if patience is not None and time.monotonic() - started >= patience:
                return False
            if on_wait is not None:
                on_wait()
            time.sleep(POLL_SECONDS)
        self._fence = fence
        _heartbeats.add(fence)
        if self._guards is not None:
            atomic_files.guard(self._guards, fence)
        return True

    def _try(self) -> Fence | None:
        number = lease.highest_number(
            self.path
        )  # first: one that is taken meanwhile is never passed by
        return (
            None if lease.is_held(self.path, number) else lease.create_lease(self.path, number + 1)
        )

    @property
    def fence(self) -> Fence:
        """Tells, here or in a process that writes for this one, whether the lock is still held."""
        assert self._fence is not None, "only the holder has a fence"
        return self._fence

    def holder(self) -> str:
        """Who holds it, for people."""
        return lease.describe_holder(self.path)

    def release(self) -> None:
        fence, self._fence = self._fence, None
        if fence is not None:
            if self._guards is not None:
                atomic_files.unguard(self._guards, fence)
            _heartbeats.end(fence)
            if self._own:
                lease.remove_lease(fence)

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
    """Whether some process holds the lock; see `kvlab.fs.lease.is_held`."""
    return lease.is_held(Path(path))


def seems_held(path: str | Path) -> bool:
    """`is_held` for one that asks once, and cannot watch the heartbeat: for people, not to write.

    A lease counts as given up if its file is old by this machine's clock, generously.
    """
    path = Path(path)
    if not lease.is_held(path):
        return False
    place = lease.lease_path(path, lease.highest_number(path))
    found = lease.read_lease(place)
    try:
        age = time.time() - os.stat(place).st_mtime
    except OSError:
        return True  # taken anew meanwhile
    limit = float(found.facts.get("seconds", 0.0)) if found else 0.0
    return age < limit + GRACE_SECONDS


class _HeartbeatThread:
    """The heartbeats of everything that this process holds, from one thread."""

    def __init__(self) -> None:
        self._change = threading.Lock()
        self._held: dict[Fence, int] = {}
        self._thread: threading.Thread | None = None

    def add(self, fence: Fence) -> None:
        with self._change:
            self._held[fence] = 0
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvlab-leases", daemon=True)
                self._thread.start()

    def end(self, fence: Fence) -> None:
        """Says that it is free, if it is still ours."""
        with self._change:
            beat = self._held.pop(fence, None)
            if beat is not None:
                _write_heartbeat(fence, "free", beat)

    def forget(self) -> None:
        """In a forked child: what the parent holds is the parent's."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        while True:
            time.sleep(lease.lease_seconds() / HEARTBEATS_PER_LEASE)
            with self._change:
                if not self._held:
                    self._thread = None
                    return
                for fence, beat in list(self._held.items()):
                    if _write_heartbeat(fence, "held", beat + 1):
                        self._held[fence] = beat + 1
                    else:  # lost: its fence says so to whoever asks
                        del self._held[fence]


def _write_heartbeat(fence: Fence, state: str, beat: int) -> bool:
    try:
        return lease.write_heartbeat(fence, state, beat)
    except (OSError, StoreError):  # a hiccup of the file system: the next beat tries again
        return True


_heartbeats = _HeartbeatThread()
os.register_at_fork(after_in_child=_heartbeats.forget)
