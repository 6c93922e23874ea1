"""Check that all machines of a cluster see the store that the driver sees.

Before anything starts, a file written here is read on every machine, and a file written there is
read here.
"""

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from kvlab.errors import UsageError
from kvlab.fs.atomic_files import write_atomic

PATIENCE_SECONDS = 15.0
"""Time for a file to become visible: network mounts cache the contents of a folder."""

_DRIVER_FILE = "driver"

RunOnAllMachines = Callable[[Callable[[str], str], str], Mapping[str, str | Exception]]
"""`kvlab.sweep.executors.executor.Executor.run_on_all_machines`."""


def check_store_is_shared(
    store: Path,
    folder: Path,
    run_on_all_machines: RunOnAllMachines,
    timeout: float = PATIENCE_SECONDS,
) -> None:
    """Write and read a few bytes in ``folder`` from here and from every machine.

    Args:
        store: The store's path, for the message.
        folder: Inside of it. Nothing stays there.
        run_on_all_machines: Calls a function of a path on every machine.
        timeout: Seconds to wait here for a file from there.

    Raises:
        UsageError: A machine does not share the store.
        StoreError: The store cannot be written here.
    """
    probe = folder.absolute() / f".probe-{uuid.uuid4().hex}"
    write_atomic(probe / _DRIVER_FILE, probe.name)
    try:
        answers = run_on_all_machines(answer_probe, str(probe))
        problems = {
            machine: _find_sharing_problem(probe, answer, timeout)
            for machine, answer in answers.items()
        }
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    failed = [f"{machine} {problem}" for machine, problem in problems.items() if problem]
    if failed:
        text = f"store = {store} is not shared by {len(failed)} of {len(problems)} machines of the"
        text = f"{text} cluster: {'; '.join(failed[:3])}{'; ...' if failed[3:] else ''}"
        hint = "name one with --store on a file system that all of them mount at the same path"
        raise UsageError(f"{text}; {hint}")


def answer_probe(probe: str) -> str:
    """Read and write a file, on a machine of the cluster.

    Returns:
        The name of the file that was written here, or the problem after a space, with which no name
        starts.
    """
    folder = Path(probe)
    if not _file_arrives(folder / _DRIVER_FILE, folder.name, PATIENCE_SECONDS):
        if folder.parent.is_dir():
            return f" has another {folder.parent} than the driver"
        return f" has no {folder.parent}"
    name = uuid.uuid4().hex
    try:
        (folder / name).write_text(folder.name)
    except OSError as error:
        return f" cannot write there: {error.strerror}"
    return name


def _find_sharing_problem(probe: Path, answer: str | Exception, timeout: float) -> str:
    """Return what keeps a machine from sharing the store; empty if it shares it."""
    if isinstance(answer, Exception):
        last_line = (str(answer).strip().splitlines() or [type(answer).__name__])[-1]
        return f"cannot run kvlab: {last_line}"
    if answer.startswith(" "):
        return answer.strip()
    if not _file_arrives(probe / answer, probe.name, timeout):
        return "writes files that do not arrive here"
    return ""


def _file_arrives(path: Path, text: str, timeout: float) -> bool:
    """Return whether a file with this content is there, or appears in time."""
    started = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == text:
                return True
        if time.monotonic() - started >= timeout or not path.parent.parent.exists():
            return False
        time.sleep(0.1)
