"""A command of the user's, run when a sweep has ended: to send a message, or to start what is next.

It gets the summary as JSON on standard input, and KVLAB_SWEEP, KVLAB_OUTCOME, KVLAB_EXIT_CODE and
KVLAB_STORE in its environment. Whatever it does, it costs the sweep at most one warning.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError, UsageError
from kvlab.sweep import Summary

TIMEOUT_SECONDS = 60.0

NOTIFY_VARIABLE = "KVLAB_NOTIFY"
"""Names the command where no option does."""


@contextmanager
def notify_at_end(
    command: str | None, sweep: str, store: Path, warn: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Runs ``command`` after the block, with the facts that the block has put into the dict.

    If an error ends the block, the command is told of it instead; but not of a sweep that was
    never begun, as when another driver runs it, nor when a second Ctrl-C ends all at once.
    """
    facts: dict[str, Any] = {"sweep": sweep, "store": str(store)}
    try:
        yield facts
    except UsageError:
        raise
    except Exception as error:
        code = error.exit_code if isinstance(error, KvlabError) else 1
        run_notify_command(
            command, {**facts, "outcome": "error", "exit_code": code, "error": str(error)}, warn
        )
        raise
    run_notify_command(command, facts, warn)


def outcome_facts(summary: Summary) -> dict[str, Any]:
    """How a sweep stands, as the command gets it: ``done``, ``failed``, ``stopped`` or ``halted``
    (given up after the same failure again and again)."""
    code = summary.exit_code
    outcome = "stopped" if code == 130 else "halted" if summary.halt_reason else "failed"
    return {
        "outcome": outcome if code else "done",
        "exit_code": code,
        "states": dict(summary.states),
        "ran": summary.trials_run,
        "seconds": round(summary.seconds, 3),
        "halted": summary.halt_reason or None,
    }


def run_notify_command(
    command: str | None,
    facts: Mapping[str, Any],
    warn: Callable[[str], None],
    timeout: float = TIMEOUT_SECONDS,
) -> None:
    """Runs ``command`` by the shell; None or an empty one means nobody wants to know."""
    if not command:
        return
    environment = {
        **os.environ,
        "KVLAB_SWEEP": str(facts["sweep"]),
        "KVLAB_OUTCOME": str(facts["outcome"]),
        "KVLAB_EXIT_CODE": str(facts["exit_code"]),
        "KVLAB_STORE": str(facts["store"]),
    }
    # files, not pipes: what it leaves running in the background must not hold us up
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(json.dumps(facts, indent=1).encode() + b"\n")
        given.seek(0)
        try:
            process = subprocess.Popen(
                command,
                shell=True,
                stdin=given,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # so that all of it can be ended
            )
            code = process.wait(timeout)
        except OSError as error:
            warn(f"the notification was not sent: {error.strerror}")
            return
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            warn(f"the notification was ended after {timeout:g} s: `{command}`")
            return
        if code:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            last = f": {lines[-1][:200]}" if lines else ""
            warn(f"the notification failed with exit code {code}{last} (`{command}`)")
