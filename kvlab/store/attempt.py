"""One attempt at a trial: its directory, its log, what its process printed, and its progress.

Progress is written to the directory of the trial and to the log.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvlab.errors import StoreError
from kvlab.fs.atomic_files import explain_write_errors, replace_file, write_atomic
from kvlab.fs.lease import Fence, read_seconds
from kvlab.fs.lock import Lock
from kvlab.humanize import format_bytes, format_duration, format_number
from kvlab.store.provenance import redact_paths, utc_now
from kvlab.store.store import Store


class Attempt:
    """Create and write ``attempts/<number>/`` of a trial. Requires the trial's lock.

    Attributes:
        number: counts the attempts from 1.
        started: when it was created, see `utc_now`.
    """

    def __init__(self, store: Store, trial_id: str, fence: Fence | None):
        self._fence = fence
        self.number = store.create_attempt(trial_id)
        self.directory = store.attempt_directory(trial_id, self.number)
        self.started = utc_now()

    @property
    def log_path(self) -> Path:
        return self.directory / "log.txt"

    def log(self, line: str) -> None:
        """Append one line with the time in front.

        Raises:
            StoreError: the disk is full or gone.
        """
        self._append(self.log_path, f"{utc_now()} {line}")

    def _append(self, path: Path, line: str) -> None:
        with explain_write_errors(path), open(path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def log_repair(self, line: str) -> None:
        """Log that something damaged is made again; the driver tells its user, too.

        Raises:
            StoreError: the disk is full or gone.
        """
        self.log(line)
        self._append(self.directory / "repairs.txt", line)

    def mark_paused(self) -> None:
        """Record that the attempt ended as planned, without a result; see `Store.count_pauses`."""
        write_atomic(self.directory / "paused", "", fence=self._fence)

    def write_traceback(self, text: str) -> str:
        """Write a traceback and return its path relative to the trial's directory."""
        write_atomic(self.directory / "traceback.txt", redact_paths(text), fence=self._fence)
        return f"attempts/{self.number}/traceback.txt"


@contextmanager
def log_warnings(attempt: Attempt) -> Iterator[None]:
    """Send Python warnings and log records to the attempt's log instead of the terminal."""
    handler = logging.FileHandler(attempt.log_path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    logging.captureWarnings(True)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        logging.captureWarnings(False)
        handler.close()


@contextmanager
def redirect_output(path: Path) -> Iterator[None]:
    """Append what this process prints, native libraries included, to ``path``."""
    with open(path, "ab", buffering=0) as file:
        sys.stdout.flush()
        sys.stderr.flush()
        saved = [(stream, os.dup(stream)) for stream in (1, 2)]
        for stream, _ in saved:
            os.dup2(file.fileno(), stream)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for stream, copy in saved:
                os.dup2(copy, stream)
                os.close(copy)


# Progress


ProgressUpdate = Mapping[str, Any]


WRITE_INTERVAL_SECONDS = 0.5
LOG_INTERVAL_SECONDS = 10.0

SLOW_SHARE = 0.01
"""Share of the time that reading or writing a shared file may take. A call to a file system on a
network takes milliseconds."""

LONGEST_WAIT_SECONDS = 5.0


class Pace:
    """When something is due: every ``seconds``, or less often if it takes long."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._due_at, self._took = float("-inf"), 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._due_at

    @contextmanager
    def take_time(self) -> Iterator[None]:
        """Measure the block. The shorter of two times counts: other work may interrupt one."""
        began, before = time.monotonic(), self._took
        yield
        self._took = time.monotonic() - began
        wait = min(before, self._took) / SLOW_SHARE
        self._due_at = began + max(self._seconds, min(wait, LONGEST_WAIT_SECONDS))


class ProgressReporter:
    """Pass on the updates of a trial's stages: a new stage at once, others at intervals.

    An update is ``{"stage": ...}`` with any of ``step``, ``steps``, ``loss``,
    ``tokens_per_second``, ``flops_per_second``, ``mfu`` (per device), ``peak_bytes``,
    ``process_bytes``, ``seconds_left``, ``note`` and ``curves``: those of a result, as far as the
    training has come.

    Args:
        path: of the file that other processes read.
        log: writes a line to the trial's log.
        fence: of the lock on the trial.
    """

    def __init__(self, path: Path, log: Callable[[str], None], fence: Fence | None = None):
        self._path, self._log, self._fence = path, log, fence
        self._stage: str | None = None
        self._logged_at, self._pace = float("-inf"), Pace(WRITE_INTERVAL_SECONDS)

    def __call__(self, update: ProgressUpdate) -> None:
        now, stage = time.monotonic(), str(update.get("stage", ""))
        is_new_stage = stage != self._stage
        self._stage = stage
        if is_new_stage or now - self._logged_at >= LOG_INTERVAL_SECONDS:
            self._logged_at = now
            self._log(format_progress(update))
        if is_new_stage or self._pace.is_due():
            with self._pace.take_time():
                write_progress(self._path, {**update, "updated": utc_now()}, self._fence)


def write_progress(path: Path, state: ProgressUpdate, fence: Fence | None = None) -> None:
    """Replace the progress file, without syncing it: it matters only while the trial runs."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(state))
    try:
        replace_file(temporary, path, fence)
    finally:
        temporary.unlink(missing_ok=True)


STALL_VARIABLE = "KVLAB_STALL_SECONDS"
stall_seconds = partial(read_seconds, STALL_VARIABLE, 3600.0, 1e9)
"""After how long without progress another process is not waited for any more."""


class StallWatch:
    """Measure for how long another process has written nothing into some directories.

    A process may hold a lock and renew it, and be stuck all the same. Whoever works replaces files
    in its directories, which changes when these were modified. Only whether that time changes
    counts, by the watcher's monotonic clock, so that clocks need not agree.

    Args:
        directories: Of the trial and the training that the process works on.
    """

    def __init__(self, directories: Sequence[Path]):
        self._directories = tuple(directories)
        self._stamps: list[int] | None = None
        self._changed_at = 0.0

    def check(self, lock: Lock) -> None:
        """Raise StoreError if the process that holds ``lock`` makes no progress any more."""
        stamps: list[int] = []
        for directory in self._directories:
            with suppress(OSError):
                stamps.append(directory.stat().st_mtime_ns)
        now = time.monotonic()
        if stamps != self._stamps:
            self._stamps, self._changed_at = stamps, now
        idle = now - self._changed_at
        if idle >= stall_seconds():
            text = f"{lock.path} is held by {lock.describe_holder()}, which"
            text = f"{text} has made no progress for {format_duration(idle)}"
            hint = f"end that process, or remove {lock.path}.*, then submit again"
            raise StoreError(f"{text}; {hint} ({STALL_VARIABLE} sets this time)")


def format_progress(state: ProgressUpdate) -> str:
    """Return one line of stage, step, loss, rate and time left, as far as they are there."""
    parts = [str(state.get("stage", "running"))]
    if state.get("steps"):
        parts.append(f"{state.get('step', 0):,}/{state['steps']:,}")
    if state.get("loss") is not None:
        parts.append(f"loss {state['loss']:.4f}")
    if state.get("tokens_per_second"):
        parts.append(f"{state['tokens_per_second']:,.0f} tokens/s")
    if state.get("mfu") and state.get("flops_per_second"):
        rate = format_number(state["flops_per_second"], "FLOP/s")
        parts.append(f"{rate}, MFU {100 * state['mfu']:.0f}%")
    if state.get("peak_bytes"):
        process = state.get("process_bytes")
        beside = f" (process {format_bytes(process)})" if process else ""
        parts.append(f"peak {format_bytes(state['peak_bytes'])}{beside}")
    if state.get("seconds_left") is not None:
        parts.append(f"{format_duration(state['seconds_left'])} left")
    if state.get("note"):
        parts.append(str(state["note"]))
    return "  ".join(parts)
