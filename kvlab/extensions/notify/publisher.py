"""`kvlab submit --notify`: run a shell command at the end of a sweep.

It receives the summary as JSON on standard input, and KVLAB_SWEEP, KVLAB_OUTCOME, KVLAB_EXIT_CODE
and KVLAB_STORE in its environment. Its failure costs the sweep at most one warning.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from kvlab.cli.sweep_publishers import Publisher

TIMEOUT_SECONDS = 60.0

VARIABLE = "KVLAB_NOTIFY"
"""Environment variable with the default of ``--notify``."""


class NotifyPublisher(Publisher):
    """Run the command that the options name."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        text = f"shell command to run at the end, with the summary as JSON (default: {VARIABLE})"
        command = os.environ.get(VARIABLE)
        parser.add_argument("--notify", default=command, metavar="COMMAND", help=text)

    def tell_end(self, facts: Mapping[str, Any]) -> None:
        if self._options.notify:
            run_notify_command(self._options.notify, facts, self._warn)


def run_notify_command(
    command: str,
    facts: Mapping[str, Any],
    warn: Callable[[str], None],
    timeout: float = TIMEOUT_SECONDS,
) -> None:
    """Run ``command`` in the shell with ``facts``; kill it and its children after ``timeout``."""
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
