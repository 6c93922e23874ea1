"""Whether all machines of a cluster see the store that the driver sees, tried before anything
starts: a file from here is read on every one, and one from there is read here."""

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from kvlab.errors import UsageError
from kvlab.fs.atomic_files import write_atomic

PATIENCE_SECONDS = 15.0
"""Seconds for which a file may not be seen yet: network mounts cache what a folder holds."""

_DRIVER_FILE = "driver"

OnEveryMachine = Callable[[Callable[[str], str], str], Mapping[str, str | Exception]]
"""`kvlab.sweep.executors.executor.Executor.run_on_all_machines`."""


def check_store_is_shared(
    store: Path, folder: Path, everywhere: OnEveryMachine, patience: float = PATIENCE_SECONDS
) -> None:
    """Writes and reads a few bytes in ``folder`` from here and from every machine.

    Args:
        store: the store's path, for the message.
        folder: inside of it; nothing stays there.
        everywhere: runs a function of a path on every machine.
        patience: seconds to wait here for a file from there.

    Raises:
        UsageError: some machine does not share the store.
        StoreError: it cannot be written here.
    """
    probe = folder.absolute() / f".probe-{uuid.uuid4().hex}"
    write_atomic(probe / _DRIVER_FILE, probe.name)
    try:
        answers = everywhere(answer_probe, str(probe))
        found = {
            machine: _find_sharing_problem(probe, one, patience) for machine, one in answers.items()
        }
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    wrong = [f"{machine} {problem}" for machine, problem in found.items() if problem]
    if wrong:
        text = f"store = {store} is not shared by {len(wrong)} of {len(found)} machines of the"
        text = f"{text} cluster: {'; '.join(wrong[:3])}{'; ...' if wrong[3:] else ''}"
        way_out = "name one with --store on a file system that all of them mount at the same path"
        raise UsageError(f"{text}; {way_out}")


def answer_probe(probe: str) -> str:
    """Runs on a machine of the cluster: the name of a file written there, or what is wrong.

    What is wrong starts with a space, which no name does.
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


def _find_sharing_problem(probe: Path, said: str | Exception, patience: float) -> str:
    """What keeps a machine from sharing the store; empty if it shares it."""
    if isinstance(said, Exception):
        last = (str(said).strip().splitlines() or [type(said).__name__])[-1]
        return f"cannot run kvlab: {last}"
    if said.startswith(" "):
        return said.strip()
    if not _file_arrives(probe / said, probe.name, patience):
        return "writes files that do not arrive here"
    return ""


def _file_arrives(path: Path, text: str, patience: float) -> bool:
    """Whether a file is there, or comes, with these contents."""
    started = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == text:
                return True
        if time.monotonic() - started >= patience or not path.parent.parent.exists():
            return False
        time.sleep(0.1)
