"""Lock that gives one of several trials on a GPU the device to itself while it measures speed.

Every trial on a shared device holds the device lock in shared mode while it works, and checks
between steps whether another one wants it. A trial that measures speed takes it in exclusive
mode: the others wait at their next step. A second lock is the gate in front of it. The one that
measures closes the gate first, so that trials which come back from a step cannot starve it.

Both are ``flock`` locks in this machine's folder for temporary files, since a device belongs to
one machine. They end with their process. Other programs on the device are not kept out.
"""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.02

EXCLUSIVE_TIMEOUT_SECONDS = 1800.0
"""How long to wait for the device alone before measuring beside other trials."""


class TimingLock:
    """This process's lock on one device. Not thread-safe.

    Args:
        device: names it on this machine, such as a GPU's UUID.
        folder: of the lock files; default a folder of this user among the temporary files.
        synchronize: waits until the device has finished its queued work.
    """

    def __init__(
        self, device: str, folder: Path | None = None, synchronize: Callable[[], None] | None = None
    ):
        folder = folder or Path(tempfile.gettempdir()) / f"kvlab-devices-{os.getuid()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = re.sub(r"[^\w-]", "_", device)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._gate, self._device = (
            os.open(folder / f"{name}.{part}", flags, 0o600) for part in ("gate", "device")
        )
        self._synchronize = synchronize or (lambda: None)

    def close(self) -> None:
        """Release the device."""
        os.close(self._device)
        os.close(self._gate)

    def share(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait until no trial measures speed; none starts to before `yield_to_timing`.

        Args:
            on_wait: called while waiting; what it raises ends that.
        """
        fcntl.flock(self._device, fcntl.LOCK_UN)  # held by a trial that failed in this process
        _acquire(self._gate, fcntl.LOCK_SH, None, on_wait)
        _acquire(self._device, fcntl.LOCK_SH, None, on_wait)
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def yield_to_timing(self, on_wait: Callable[[], None] = lambda: None) -> bool:
        """Let a trial that waits for it measure speed now; return whether one did."""
        if _try_flock(self._gate, fcntl.LOCK_SH):
            fcntl.flock(self._gate, fcntl.LOCK_UN)
            return False
        self._synchronize()
        self.share(on_wait)
        return True

    @contextmanager
    def exclusive(
        self, on_wait: Callable[[], None] = lambda: None, timeout: float = EXCLUSIVE_TIMEOUT_SECONDS
    ) -> Iterator[bool]:
        """Hold the device alone during the block, and yield whether this succeeded.

        Args:
            on_wait: called while waiting; what it raises ends that.
            timeout: seconds to wait for the other trials.
        """
        deadline = time.monotonic() + timeout
        fcntl.flock(self._device, fcntl.LOCK_UN)
        try:
            is_held = _acquire(self._gate, fcntl.LOCK_EX, deadline, on_wait)
            is_held = is_held and _acquire(self._device, fcntl.LOCK_EX, deadline, on_wait)
            yield is_held
        finally:
            fcntl.flock(self._device, fcntl.LOCK_UN)
            fcntl.flock(self._gate, fcntl.LOCK_UN)


def _acquire(handle: int, mode: int, deadline: float | None, on_wait: Callable[[], None]) -> bool:
    while not _try_flock(handle, mode):
        on_wait()
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _try_flock(handle: int, mode: int) -> bool:
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
