"""Timings alone on a device that several trials share.

Every trial on a shared device holds its lock together with the others while it works, and lets
go between steps. One that times takes the lock alone: the others wait at their next step until
it is done. A second lock is the gate in front of it: whoever times closes the gate first, so
that those who come back from a step cannot keep it out for ever.

Both are ``flock`` locks in this machine's folder for temporary files, which is where a device
is: they end with their process. What other programs do on the device is not known here.
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

PATIENCE_SECONDS = 1800.0
"""For the device alone; after that a timing is taken beside the others, and says so."""


class TimingLock:
    """This process's turns on one device. Used by one thread.

    Args:
        device: names it on this machine, such as a GPU's UUID.
        folder: of the locks; default one of this user's in the folder for temporary files.
        settle: waits until the device has done what it was given.
    """

    def __init__(
        self, device: str, folder: Path | None = None, settle: Callable[[], None] = lambda: None
    ):
        place = folder or Path(tempfile.gettempdir()) / f"kvlab-devices-{os.getuid()}"
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = re.sub(r"[^\w-]", "_", device)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._gate, self._device = (
            os.open(place / f"{name}.{part}", flags, 0o600) for part in ("gate", "device")
        )
        self._settle = settle

    def close(self) -> None:
        """Lets go of the device."""
        os.close(self._device)
        os.close(self._gate)

    def enter(self, check: Callable[[], None] = lambda: None) -> None:
        """Waits until nobody times; from here on nobody does until `give_way`.

        Args:
            check: called while waiting; what it raises ends that.
        """
        fcntl.flock(self._device, fcntl.LOCK_UN)  # of a trial that ended by an error
        _acquire(self._gate, fcntl.LOCK_SH, None, check)
        _acquire(self._device, fcntl.LOCK_SH, None, check)
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def give_way(self, check: Callable[[], None] = lambda: None) -> bool:
        """Between steps: lets somebody time who waits for it. True if somebody did."""
        if _try_flock(self._gate, fcntl.LOCK_SH):
            fcntl.flock(self._gate, fcntl.LOCK_UN)
            return False
        self._settle()
        self.enter(check)
        return True

    @contextmanager
    def alone(
        self, check: Callable[[], None] = lambda: None, patience: float = PATIENCE_SECONDS
    ) -> Iterator[bool]:
        """The device for this process alone; gives whether it is, for the length of the block.

        Args:
            check: called while waiting; what it raises ends that.
            patience: seconds to wait for the others.
        """
        deadline = time.monotonic() + patience
        fcntl.flock(self._device, fcntl.LOCK_UN)
        try:
            ours = _acquire(self._gate, fcntl.LOCK_EX, deadline, check)
            ours = ours and _acquire(self._device, fcntl.LOCK_EX, deadline, check)
            yield ours
        finally:
            fcntl.flock(self._device, fcntl.LOCK_UN)
            fcntl.flock(self._gate, fcntl.LOCK_UN)


def _acquire(handle: int, kind: int, deadline: float | None, check: Callable[[], None]) -> bool:
    while not _try_flock(handle, kind):
        check()
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _try_flock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
