"""MLflow beside a running sweep: an outage costs one warning, never a trial and no waiting."""

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kvlab.errors import CopyError, StoreError, TrackingError
from kvlab.store import Store
from kvlab.store.object_storage import ObjectStorage
from kvlab.store.sweep_backup import check_outside_store, copy_description, copy_sweep, copy_trial

if TYPE_CHECKING:
    from kvlab.track import Tracker


class MLflowCallback:
    """Mirrors one sweep while the driver runs it.

    Args:
        store: of the record.
        sweep: its name.
        uri: of MLflow; None as `kvlab.track.Tracker`.
        warn: takes the one warning.
    """

    def __init__(self, store: Store, sweep: str, uri: str | None, warn: Callable[[str], None]):
        self._store, self._sweep, self._uri, self._warn = store, sweep, uri, warn
        self._tracker: Tracker | None = None
        self._error: str | None = None

    def result(self, trial_id: str) -> None:
        """Mirrors a trial that has just been recorded; after an outage, waits for `finish`."""
        if self._error is not None:
            return
        try:
            if self._tracker is not None:
                self._tracker.mirror_trial(self._sweep, trial_id)
            else:  # all of them, for what a driver that was killed has left
                self._connected().mirror(self._sweep)
        except TrackingError as error:
            self._failed(error)

    def finish(self, report: Path | None) -> dict[str, str | None]:
        """Brings all of it up to date, with the report; returns where, and what went wrong."""
        try:
            self._connected().mirror(self._sweep, report)
        except TrackingError as error:
            self._failed(error)
            return {"uri": self._uri, "error": self._error}
        return {"uri": self._connected().uri, "error": None}

    def _connected(self) -> "Tracker":
        from kvlab.track import Tracker

        if self._tracker is None:
            tracker = Tracker(self._store.path, self._uri)
            tracker.close_zombies()
            self._tracker = tracker
        return self._tracker

    def _failed(self, error: TrackingError) -> None:
        if self._error is None:
            text = f"MLflow is not up to date: {error}"
            self._warn(f"{text}; the sweep goes on without it")
        self._error = str(error)
        self._tracker = None  # the end connects anew, which tells soon whether it is back


# Object storage beside a running sweep: an outage costs one warning, never a trial.


COPY_TO_VARIABLE = "KVLAB_COPY_TO"
"""Names the URL where no option does."""


class BackupCallback:
    """Copies every trial of one sweep as it ends, in a thread: the driver does not wait for it.

    Args:
        store: of the record.
        sweep: its name.
        url: of object storage; None or empty copies nothing.
        warn: takes the one warning.

    Raises:
        UsageError: the URL cannot be opened here, or lies in the store.
    """

    def __init__(self, store: Store, sweep: str, url: str | None, warn: Callable[[str], None]):
        self._store, self._sweep, self._warn = store, sweep, warn
        self._copies = ObjectStorage(url) if url else None
        if self._copies is not None:
            check_outside_store(self._copies, store)
        self._ended: SimpleQueue[str | None] = SimpleQueue()
        self._known: set[str] = set()
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def result(self, trial_id: str) -> None:
        """Takes a trial that has just been recorded."""
        if self._copies is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvlab-copier", daemon=True)
            self._thread.start()
        self._known.discard(trial_id)
        self._ended.put(trial_id)

    def finish(self) -> dict[str, str | None]:
        """Waits for what is under way, then copies all that is missing there, such as what a
        driver that was killed has left; returns where to, and what went wrong."""
        if self._copies is None:
            return {"url": None, "error": None}
        if self._thread is not None:
            self._ended.put(None)
            self._thread.join()
        try:
            copy_sweep(self._store, self._copies, self._sweep, known=self._known)
        except (CopyError, StoreError) as error:
            self._failed(error)
            return {"url": self._copies.shown, "error": self._error}
        return {"url": self._copies.shown, "error": None}

    def _run(self) -> None:
        assert self._copies is not None, "only where there is a place to copy to"
        while (trial := self._ended.get()) is not None:
            if self._error is not None:
                continue  # an outage: `finish` tries again
            try:
                copy_trial(self._store, self._copies, trial)
                copy_description(self._store, self._copies, self._sweep)
                self._known.add(trial)
            except (CopyError, StoreError) as error:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        if self._error is None:
            self._warn(f"the copy is not up to date: {error}; the sweep goes on without it")
        self._error = str(error)
