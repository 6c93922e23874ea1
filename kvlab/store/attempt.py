"""One attempt at a trial: its directory, its log, and what its process printed."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.errors import StoreError
from kvlab.fs.atomic_files import write_atomic
from kvlab.fs.lease import Fence
from kvlab.store.provenance import redact_paths, utc_now
from kvlab.store.store import Store


class Attempt:
    """Create and write ``attempts/<number>/`` of a trial. Requires the trial's lock.

    Attributes:
        number: counts the attempts from 1.
        started: when it was created, see `utc_now`.
    """

    def __init__(self, store: Store, trial_id: str, fence: Fence | None = None):
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
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            text = f"{path} cannot be written: {error.strerror}"
            raise StoreError(f"{text}; free or repair the disk, submit again") from None

    def log_repair(self, line: str) -> None:
        """Log that something damaged is made again; the driver tells its user, too.

        Raises:
            StoreError: the disk is full or gone.
        """
        self.log(line)
        self._append(self.directory / "repairs.txt", line)

    def mark_paused(self) -> None:
        """Record that the attempt ended at a rung of a search; see `Store.count_pauses`."""
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
