"""Publish the results of `kvlab submit` while a sweep runs, and at its end.

The core publishes to MLflow; extensions add others. An outage of a target costs one warning and no
trial. While the driver publishes a trial, it starts no other: a slow server delays a sweep.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import KvlabError, TrackingError, UsageError
from kvlab.humanize import redact_url
from kvlab.own_extensions import find_members
from kvlab.store import Store
from kvlab.sweep import Summary

if TYPE_CHECKING:
    from kvlab.track import Tracker


class Publisher:
    """Publishes one sweep to a target, or does nothing where the options name none.

    Args:
        options: Of `kvlab submit`.
        store: Where the trials are recorded.
        sweep: Its name.
        warn: Called with the warning about an outage.
    """

    def __init__(
        self, options: argparse.Namespace, store: Store, sweep: str, warn: Callable[[str], None]
    ):
        self._options, self._store, self._sweep, self._warn = options, store, sweep, warn
        self._error: str | None = None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the options of `kvlab submit` that name the target."""

    @staticmethod
    def check(options: argparse.Namespace, store: Store) -> None:
        """Raise UsageError for a target that cannot be one, before anything runs."""

    def on_result(self, trial_id: str) -> None:
        """Publish a trial that has ended. The driver calls it after every recorded trial."""

    def finish(self, report: Path | None) -> dict[str, str | None] | None:  # noqa: ARG002
        """Bring the target up to date; return what the summary says of it, if anything."""
        return None

    def tell_end(self, facts: Mapping[str, Any]) -> None:
        """Tell the target of the end of the sweep, or of the error that has ended it."""

    def _warn_of_outage(self, what: str, error: Exception) -> None:
        if self._error is None:
            self._warn(f"{what} is not up to date: {error}; the sweep goes on without it")
        self._error = str(error)


class MLflowPublisher(Publisher):
    """Mirror a sweep into MLflow; see `kvlab.track.Tracker` for the default of the target."""

    _tracker: "Tracker | None" = None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tracking-uri", metavar="URI", help="MLflow server or database")

    @staticmethod
    def check(options: argparse.Namespace, store: Store) -> None:
        from kvlab.track.connection import check_uri, tracking_uri

        check_uri(tracking_uri(store.path, options.tracking_uri))

    def on_result(self, trial_id: str) -> None:
        """Mirror a trial; after an outage, leave it to `finish`."""
        if self._error is not None:
            return
        try:
            if self._tracker is not None:
                self._tracker.mirror_trial(self._sweep, trial_id)
            else:  # the whole sweep: a driver that was killed may have mirrored only a part
                self._connect().mirror(self._sweep)
        except TrackingError as error:
            self._lose_tracker(error)

    def finish(self, report: Path | None) -> dict[str, str | None]:
        """Mirror the whole sweep with its report; return the URI and the error, if any."""
        from kvlab.track.connection import tracking_uri

        uri = redact_url(tracking_uri(self._store.path, self._options.tracking_uri))
        try:
            self._connect().mirror(self._sweep, report)
        except TrackingError as error:
            self._lose_tracker(error)
            return {"uri": uri, "error": self._error}
        return {"uri": uri, "error": None}

    def _connect(self) -> "Tracker":
        from kvlab.track import Tracker  # imports MLflow, which takes seconds

        if self._tracker is None:
            self._tracker = Tracker(self._store.path, self._options.tracking_uri)
        return self._tracker

    def _lose_tracker(self, error: TrackingError) -> None:
        self._warn_of_outage("MLflow", error)
        self._tracker = None  # `finish` connects again and finds out whether the outage is over


def find_publishers() -> dict[str, type[Publisher]]:
    """Return publishers by their key in the summary."""
    return {"mlflow": MLflowPublisher, **find_members("publishers")}


@contextmanager
def tell_end(publishers: Sequence[Publisher], facts: dict[str, Any]) -> Iterator[None]:
    """Tell publishers of the end of the block, with the facts that the block has added.

    If an error ends the block, the facts are about that error. Nobody is told if the sweep never
    began (UsageError), nor after a second Ctrl-C.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        code = error.exit_code if isinstance(error, KvlabError) else 1
        facts |= {"exit_code": code, "outcome": "error", "error": str(error)}
        for one in publishers:
            one.tell_end(facts)
        raise
    for one in publishers:
        one.tell_end(facts)


def collect_outcome(summary: Summary, seconds: float) -> dict[str, Any]:
    """Return the facts about the end of a sweep.

    The outcome is ``done``, ``failed``, ``stopped``, or ``halted`` if the driver gave up because
    the same failure repeated.
    """
    failed = "halted" if summary.halt_reason else "failed"
    return {
        "outcome": {0: "done", 130: "stopped"}.get(summary.exit_code, failed),
        "exit_code": summary.exit_code,
        "states": dict(summary.states),
        "ran": summary.trials_run,
        "seconds": round(seconds, 3),
        "halted": summary.halt_reason or None,
    }
