"""`kvlab submit --copy-to`: copy the record of a sweep while it runs, and at its end."""

import argparse
import os
import threading
import time
from pathlib import Path

from kvlab.cli.sweep_publishers import Publisher
from kvlab.errors import KvlabError
from kvlab.extensions.copy.record_copies import check_place, copy_sweep
from kvlab.humanize import redact_url
from kvlab.store import Store

VARIABLE = "KVLAB_COPY_TO"
"""Environment variable with the default of ``--copy-to``."""

COPY_SECONDS = 600.0
"""Time between two copies of the record while a sweep runs."""


class CopyPublisher(Publisher):
    """Copy the record of a sweep to a folder or a URL, in a thread, and at the end."""

    _thread: threading.Thread | None = None
    _next = 0.0

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        text = f"copy the record to this URL or folder every ten minutes (default: {VARIABLE})"
        default = os.environ.get(VARIABLE)
        parser.add_argument("--copy-to", default=default, metavar="PLACE", help=text)

    @staticmethod
    def check(options: argparse.Namespace, store: Store) -> None:
        if options.copy_to:
            check_place(options.copy_to, store)

    def on_result(self, trial_id: str) -> None:  # noqa: ARG002 (a publisher's)
        """Copy the record anew if the last copy is over and was begun some minutes ago.

        An outage is tried again then, too: it is the machine of the record that may be lost.
        """
        if not self._options.copy_to or time.monotonic() < self._next:
            return
        if self._thread is None or not self._thread.is_alive():
            self._next = time.monotonic() + COPY_SECONDS
            self._thread = threading.Thread(target=self._copy, name="kvlab-copy", daemon=True)
            self._thread.start()

    def finish(self, report: Path | None) -> dict[str, str | None]:  # noqa: ARG002
        """Copy the record; return the place and the error, if any."""
        if not self._options.copy_to:
            return {"url": None, "error": None}
        if self._thread is not None:
            self._thread.join()
        return {"url": redact_url(self._options.copy_to), "error": self._copy()}

    def _copy(self) -> str | None:
        try:
            copy_sweep(self._store, self._sweep, self._options.copy_to)
        except (KvlabError, OSError) as error:  # of a full disk, or a file that has just gone
            self._warn_of_outage("the copy", error)
            return self._error
        return None
