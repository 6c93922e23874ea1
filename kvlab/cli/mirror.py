"""MLflow beside a running sweep: an outage costs one warning, never a trial and no waiting."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.errors import TrackingError
from kvlab.trial import Store

if TYPE_CHECKING:
    from kvlab.track import Tracker


class Mirror:
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
