"""Object storage beside a running sweep: an outage costs one warning, never a trial."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvlab.errors import CopyError, StoreError
from kvlab.trial import Store
from kvlab.trial.copies import Copies
from kvlab.trial.copying import check_apart, copy_description, copy_sweep, copy_trial

VARIABLE = "KVLAB_COPY_TO"
"""Names the URL where no option does."""


class Copier:
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
        self._copies = Copies(url) if url else None
        if self._copies is not None:
            check_apart(self._copies, store)
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
