"""Publish results while a sweep runs, to MLflow and to object storage, and notify at its end.

A callback has ``on_result(trial_id)``, which the driver calls after every recorded trial, and
``finish``, which brings the target up to date at the end. An outage of the target costs one
warning; it neither ends a trial nor delays the sweep.

The command of `kvlab submit --notify` receives the summary as JSON on standard input, and
KVLAB_SWEEP, KVLAB_OUTCOME, KVLAB_EXIT_CODE and KVLAB_STORE in its environment. Its failure costs
the sweep at most one warning.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import CopyError, KvlabError, StoreError, TrackingError, UsageError
from kvlab.store import Store
from kvlab.store.record_archive import copy_sweep, redact_url
from kvlab.sweep import Summary

if TYPE_CHECKING:
    from kvlab.track import Tracker


COPY_TO_VARIABLE = "KVLAB_COPY_TO"
"""Environment variable with the default of ``kvlab submit --copy-to``."""

COPY_SECONDS = 600.0
"""Time between two copies of the record while a sweep runs."""


class _Callback:
    """Publishes a sweep to a target; an outage of the target costs one warning."""

    def __init__(self, store: Store, sweep: str, target: str | None, warn: Callable[[str], None]):
        self._store, self._sweep, self._target, self._warn = store, sweep, target, warn
        self._error: str | None = None

    def _handle_outage(self, what: str, error: KvlabError) -> None:
        if self._error is None:
            self._warn(f"{what} is not up to date: {error}; the sweep goes on without it")
        self._error = str(error)


class MLflowCallback(_Callback):
    """Mirror a sweep into MLflow.

    Args:
        store: Where the trials are recorded.
        sweep: Its name.
        target: URI of the MLflow server or database; see `kvlab.track.Tracker` for the default.
        warn: Called with the warning about an outage.
    """

    _tracker: "Tracker | None" = None

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
        try:
            tracker = self._connect()
            tracker.mirror(self._sweep, report)
        except TrackingError as error:
            self._lose_tracker(error)
            return {"uri": self._target, "error": self._error}
        return {"uri": tracker.uri, "error": None}

    def _connect(self) -> "Tracker":
        from kvlab.track import Tracker  # imports MLflow, which takes seconds

        if self._tracker is None:
            self._tracker = Tracker(self._store.path, self._target)
        return self._tracker

    def _lose_tracker(self, error: TrackingError) -> None:
        self._handle_outage("MLflow", error)
        self._tracker = None  # `finish` connects again and finds out whether the outage is over


class BackupCallback(_Callback):
    """Copy the record of a sweep to a folder or a URL, in a thread, and at the end.

    Args:
        store: Where the trials are recorded.
        sweep: Its name.
        target: Place of `kvlab.store.record_archive.copy_sweep`; None or an empty string copies
            nothing.
        warn: Called with the warning about an outage.
    """

    _thread: threading.Thread | None = None
    _next = 0.0

    def on_result(self, trial_id: str) -> None:  # noqa: ARG002 (a callback's)
        """Copy the record anew if the last copy is over and was begun some minutes ago."""
        if not self._target or self._error is not None or time.monotonic() < self._next:
            return
        if self._thread is None or not self._thread.is_alive():
            self._next = time.monotonic() + COPY_SECONDS
            self._thread = threading.Thread(target=self._copy, name="kvlab-backup", daemon=True)
            self._thread.start()

    def finish(self) -> dict[str, str | None]:
        """Copy the record; return the place and the error, if any."""
        if not self._target:
            return {"url": None, "error": None}
        if self._thread is not None:
            self._thread.join()
        return {"url": redact_url(self._target), "error": None if self._copy() else self._error}

    def _copy(self) -> bool:
        try:
            copy_sweep(self._store, self._sweep, self._target or "")
        except (CopyError, StoreError) as error:
            self._handle_outage("the copy", error)
            return False
        return True


# Notification


TIMEOUT_SECONDS = 60.0

NOTIFY_VARIABLE = "KVLAB_NOTIFY"
"""Environment variable with the default of ``kvlab submit --notify``."""


@contextmanager
def notify_at_end(
    command: str | None, sweep: str, store: Path, warn: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Run ``command`` after the block, with the facts that the block has put into the dict.

    If an error ends the block, the facts are about that error. The command does not run if the
    sweep never began (UsageError), nor after a second Ctrl-C.

    Args:
        command: For the shell; None or an empty string runs nothing.
        sweep: Its name.
        store: Where it is recorded.
        warn: Called with the warning if the command fails.
    """
    facts: dict[str, Any] = {"sweep": sweep, "store": str(store)}
    try:
        yield facts
    except UsageError:
        raise
    except Exception as error:
        code = error.exit_code if isinstance(error, KvlabError) else 1
        facts |= {"exit_code": code, "outcome": "error", "error": str(error)}
        run_notify_command(command, facts, warn)
        raise
    run_notify_command(command, facts, warn)


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


def run_notify_command(
    command: str | None,
    facts: Mapping[str, Any],
    warn: Callable[[str], None],
    timeout: float = TIMEOUT_SECONDS,
) -> None:
    """Run ``command`` in the shell with ``facts``; kill it and its children after ``timeout``."""
    if not command:
        return
    names = ("sweep", "outcome", "exit_code", "store")
    environment = {**os.environ, **{f"KVLAB_{name.upper()}": str(facts[name]) for name in names}}
    # files, not pipes: a process that it leaves in the background would keep a pipe open
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
        stdin.write(json.dumps(facts, indent=1).encode() + b"\n")
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                command,
                shell=True,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # so that its children can be killed with it
            )
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            warn(f"the notification was ended after {timeout:g} s: `{command}`")
            return
        if code:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            last = f": {lines[-1][:200]}" if lines else ""
            warn(f"the notification failed with exit code {code}{last} (`{command}`)")
