"""Where everything of a store is, and the locks that say who may write it."""

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from kvlab.errors import StoreError, UsageError
from kvlab.fs.lock import Lock, seems_held
from kvlab.spec.spec_model import NAME_PATTERN, NAME_RULE

ID_PATTERN = re.compile(r"[0-9a-f]{16}\Z")


class StorePaths:
    """Paths and locks in a store.

    Attributes:
        path: The folder of the store.
    """

    path: Path

    # Paths

    def trial_directory(self, trial_id: str) -> Path:
        return self.path / "trials" / _check_id(trial_id)

    def training_directory(self, training_id: str) -> Path:
        return self.path / "trainings" / _check_id(training_id)

    def trunk_directory(self, trunk_id: str) -> Path:
        return self.path / "trunks" / _check_id(trunk_id)

    def sweep_directory(self, name: str) -> Path:
        if not re.match(NAME_PATTERN, name) or name.endswith("\n"):
            raise UsageError(f"sweep = {name!r} is not a name; {NAME_RULE}")
        return self.path / "sweeps" / name

    def stop_flag(self, name: str) -> Path:
        """Return the file whose presence asks all trials of a sweep to stop."""
        return self.sweep_directory(name) / "stop"

    def new_driver_stop_flag(self, name: str) -> Path:
        """Return a new path for the file that asks the trials of one driver to stop."""
        return self.sweep_directory(name) / "drivers" / f"{secrets.token_hex(8)}.stop"

    # Locks

    def trial_lock(self, trial_id: str) -> Lock:
        return Lock(self.trial_directory(trial_id) / "lock")

    def training_lock(self, training_id: str) -> Lock:
        return Lock(self.training_directory(training_id) / "lock")

    def trunk_lock(self, trunk_id: str) -> Lock:
        return Lock(self.trunk_directory(trunk_id) / "lock")

    def report_lock(self, name: str) -> Lock:
        return Lock(self.sweep_directory(name) / "report")

    def driver_lock(self, name: str) -> Lock:
        """Return a new lock that a driver holds while it runs; a sweep may have several drivers."""
        path = self.sweep_directory(name) / "drivers" / secrets.token_hex(8)
        return Lock(path, remove_on_release=True)

    def driver_locks(self, name: str) -> Iterator[Lock]:
        """Iterate over the locks of all drivers, running or not."""
        folder = self.sweep_directory(name) / "drivers"
        for driver in sorted({file.partition(".")[0] for file in list_names(folder)}):
            if ID_PATTERN.match(driver):
                yield Lock(folder / driver)

    def is_running(self, trial_id: str) -> bool:
        return seems_held(self.trial_directory(trial_id) / "lock")

    def is_driven(self, name: str) -> bool:
        """Return whether a driver runs this sweep now."""
        return any(seems_held(lock.path) for lock in self.driver_locks(name))


def _check_id(text: str) -> str:
    if not ID_PATTERN.match(text):
        raise UsageError(f"id = {text!r} is not 16 hex digits")
    return text


def list_names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        text = f"{directory} cannot be read: {error.strerror}"
        raise StoreError(f"{text}; check its permissions") from None
