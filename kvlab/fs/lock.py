"""Locks on paths, held until released, or until their process dies or falls silent.

A lock is a lease (`kvlab.fs.lease`) whose heartbeat a thread of the holder writes. The holder
passes its `Fence` to whatever writes on its behalf (`kvlab.fs.atomic_files`).
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvlab.errors import StoreError
from kvlab.fs import lease
from kvlab.fs.lease import Fence, LeaseWatcher

POLL_SECONDS = 0.1
HEARTBEATS_PER_LEASE = 10
"""Heartbeats in the time after which a silent holder is given up."""

GRACE_SECONDS = 300.0
"""Extra age that a lease file must have before `seems_held`, which looks once, gives it up."""


class Lock:
    """An exclusive lock at a path; its lease files are written beside it.

    Args:
        remove_on_release: Remove its file on release. Only for a path that no other process
            acquires, such as one that marks a process as alive.
    """

    def __init__(self, path: str | Path, *, remove_on_release: bool = False):
        self.path, self._remove_on_release = Path(path), remove_on_release
        self._watcher = LeaseWatcher()
        self._heartbeat: _Heartbeat | None = None

    def acquire(
        self, timeout: float | None = None, on_wait: Callable[[], None] | None = None
    ) -> Fence | None:
        """Acquire the lock.

        Args:
            timeout: Seconds to try for; None tries without limit.
            on_wait: Called after every failed try; an exception that it raises ends the waiting.

        Returns:
            The fence to pass to writers; None if another process holds the lock.

        Raises:
            StoreError: The lock's file cannot be written.
        """
        assert self._heartbeat is None, "this lock is already held"
        started = time.monotonic()
        while True:
            # List first: a number that is taken meanwhile must not be skipped.
            number = lease.current_number(self.path)
            if not self._watcher.is_held(self.path, number):
                fence = lease.create_lease(self.path, number + 1)
                if fence is not None:
                    self._heartbeat = _Heartbeat(fence)
                    return fence
            if timeout is not None and time.monotonic() - started >= timeout:
                return None
            if on_wait is not None:
                on_wait()
            time.sleep(POLL_SECONDS)

    def describe_holder(self) -> str:
        """Return who holds the lock, as text for people."""
        state = lease.read_current_lease(self.path)
        holder = state.holder if state else {}
        if not holder:
            return "another process"
        host = "" if holder["host"] == lease.process_identity()["host"] else f" on {holder['host']}"
        return f"process {holder['pid']}{host} since {holder['since']}"

    def describe_wait(self, work: str) -> str:
        """Return who holds the lock since when, and what ends a wait, for people.

        Args:
            work: What the holder does under the lock, such as ``runs this trial``.
        """
        state = lease.read_current_lease(self.path)
        seconds = (state.holder if state else {}).get("seconds") or lease.lease_seconds()
        who, since, moment = self.describe_holder().partition(" since ")
        wait = "the wait ends when that process finishes or dies, or gives no sign of life for"
        return f"{who} {work}{since}{moment}; {wait} {seconds:g} s"

    def release(self) -> None:
        """Release the lock if it is held."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
            if self._remove_on_release:
                Path(heartbeat.fence.path).unlink(missing_ok=True)

    @contextmanager
    def hold(
        self, timeout: float | None = None, on_wait: Callable[[], None] | None = None
    ) -> Iterator[Fence | None]:
        """Acquire the lock for a ``with`` block; see `acquire` for arguments and value."""
        try:
            yield self.acquire(timeout, on_wait)
        finally:
            self.release()


def seems_held(path: str | Path) -> bool:
    """Return whether a lock seems held, from one look: for display, not to decide who writes.

    The lease is given up if its file is old, with `GRACE_SECONDS` more, by the clock that stamps
    files there: that of a file server may differ from this machine's, which stands for it in a
    folder that cannot be written.
    """
    path = Path(path)
    if not LeaseWatcher().is_held(path):
        return False
    file_path, now = lease.lease_path(path, lease.current_number(path)), time.time()
    state = lease.read_lease(file_path)
    with suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as file:
        now = os.fstat(file.fileno()).st_mtime
    try:
        age = now - os.lstat(file_path).st_mtime
    except OSError:
        return True  # taken over since
    limit = float(state.holder.get("seconds", 0.0)) if state else 0.0
    # a clock that was set back makes a file seem to be of the future
    return abs(age) < limit + GRACE_SECONDS


def free_abandoned(paths: Iterable[str | Path]) -> None:
    """Free the locks whose holders are gone; a lock that seems held may be one of them.

    A holder on another machine is waited for until it shows a sign of life, which takes a
    heartbeat, or until its lease is over.
    """
    watcher = LeaseWatcher()
    silent = {path: lease.read_current_lease(path) for path in map(Path, paths)}
    while silent := {
        path: first
        for path, first in silent.items()
        if first is not None
        and not lease.is_process_visible(first.holder)
        and lease.read_current_lease(path) == first
        and not watcher.free_if_abandoned(path)
    }:
        time.sleep(POLL_SECONDS)


class _Heartbeat:
    """The thread that renews one lease."""

    def __init__(self, fence: Fence):
        self.fence = fence
        self._process = os.getpid()
        self._count = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvlab-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the heartbeat and mark the lease as free, if it is still held."""
        if os.getpid() != self._process:  # a forked child: the lease is its parent's
            return
        self._stopped.set()
        self._thread.join()
        self._write("free")

    def _run(self) -> None:
        while not self._stopped.wait(lease.lease_seconds() / HEARTBEATS_PER_LEASE):
            self._count += 1
            if not self._write("held"):  # lost: its fence says so to whoever checks
                return

    def _write(self, state: str) -> bool:
        try:
            return lease.write_heartbeat(self.fence, state, self._count)
        except (OSError, StoreError):  # a transient error: the next heartbeat tries again
            return True
