"""`kvlab submit --notify`: a command of the user that runs when a sweep has ended.

It receives the summary as JSON on standard input, and KVLAB_SWEEP, KVLAB_OUTCOME, KVLAB_EXIT_CODE
and KVLAB_STORE in its environment. Its failure costs the sweep at most one warning.
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
        run_notify_command(
            command, {**facts, "outcome": "error", "exit_code": code, "error": str(error)}, warn
        )
        raise
    run_notify_command(command, facts, warn)


def collect_outcome(summary: Summary) -> dict[str, Any]:
    """Return the facts about the end of a sweep.

    The outcome is ``done``, ``failed``, ``stopped``, or ``halted`` if the driver gave up because
    the same failure repeated.
    """
    if summary.exit_code == 0:
        outcome = "done"
    elif summary.exit_code == 130:
        outcome = "stopped"
    else:
        outcome = "halted" if summary.halt_reason else "failed"
    return {
        "outcome": outcome,
        "exit_code": summary.exit_code,
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
    """Run ``command`` in the shell with ``facts``; kill it and its children after ``timeout``."""
    if not command:
        return
    environment = {
        **os.environ,
        "KVLAB_SWEEP": str(facts["sweep"]),
        "KVLAB_OUTCOME": str(facts["outcome"]),
        "KVLAB_EXIT_CODE": str(facts["exit_code"]),
        "KVLAB_STORE": str(facts["store"]),
    }
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
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            last = f": {lines[-1][:200]}" if lines else ""
            warn(f"the notification failed with exit code {code}{last} (`{command}`)")
