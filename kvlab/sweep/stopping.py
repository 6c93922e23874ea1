"""Asking a driver to stop, by a signal or by `kvlab stop`, which asks all drivers of a sweep."""

import contextlib
from pathlib import Path

from kvlab.errors import Stopped
from kvlab.trial.origin import Origin
from kvlab.trial.record import Store


class Stop:
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
