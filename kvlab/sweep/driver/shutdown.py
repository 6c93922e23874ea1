"""Asking a driver to stop, by a signal or by `kvlab stop`, which asks all drivers of a sweep."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kvlab.errors import Stopped
from kvlab.store import Store
from kvlab.store.provenance import Origin


class StopRequest:
    """Whether one driver has been asked to stop; its trials look for the same files."""

    def __init__(self, store: Store, name: str, origin: Origin):
        shared = store.stop_flag(name)
        self._own = Path(origin.own_stop_flag or shared)
        self._flags = (shared, self._own)
        self.noticed = False

    def ask(self) -> None:
        """Asks this driver and its trials, nobody else's. Safe in a signal handler.

        Raises:
            OSError: there is no room for the file.
        """
        self.noticed = True
        with contextlib.suppress(FileNotFoundError):  # no folder yet: nothing runs yet
            self._own.touch()

    def is_asked(self) -> bool:
        """Whether a file asks now, whatever was noticed before."""
        return any(flag.exists() for flag in self._flags)

    def check(self) -> None:
        """Raises Stopped if it has been asked to stop."""
        self.noticed = self.noticed or self.is_asked()
        if self.noticed:
            raise Stopped("asked to stop")

    def withdraw(self) -> None:
        """At the end: nothing of this driver runs any more."""
        if self._own != self._flags[0]:  # the shared one is for the last driver to take away
            self._own.unlink(missing_ok=True)


# Ctrl-C and SIGTERM: the first asks the sweep to stop at its checkpoints, the second ends it.


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Calls ``stop`` at the first signal of the block; the second raises KeyboardInterrupt.

    Only for the main thread, which is where Python handles signals.
    """
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (Python's signature)
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        stop()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
