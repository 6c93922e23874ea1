"""Who may write, agreed on through nothing but files in a shared folder.

A lock at ``path`` is a row of numbered files, ``path.1``, ``path.2``, ...; only the highest
counts. It says ``free``, or ``held`` with the holder's heartbeat: a number that goes up. Whoever
finds it free, or its holder gone, makes the next number with O_EXCL, which one process alone can,
and removes the lower ones before it does anything else. So a number is never given twice, and a
holder that was given up on, a suspended machine for instance, finds its own file gone.

A holder is gone if its process is dead, which can be seen on its own machine alone; or if the
heartbeat has stood still for as long as the holder itself has written there, by the watcher's own
monotonic clock: no two clocks are compared, so skewed ones do no harm.

This asks little of a file system: exclusive creation, and that an opened file is read as it was
last closed (NFS's rule). Locks by ``flock`` would ask more. Lustre and many network mounts have
none or keep them to one machine without saying so, NFS may keep those of a machine that is lost,
and none tells a holder that it has lost its lock; so leases replace them.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import time
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvlab.errors import LeaseLost, StoreError, UsageError

DEFAULT_SECONDS = 60.0
LEASE_SECONDS_VARIABLE = "KVLAB_LEASE_SECONDS"

_LEASE_LINE = re.compile(r"(held|free) (\d{12}) (\{.*\})\s*\Z")


def lease_seconds() -> float:
    """How long this process's heartbeats may fail before others take over what it holds.

    Raises:
        UsageError: the environment says no number of at least 1.
    """
    text = os.environ.get(LEASE_SECONDS_VARIABLE)
    try:
        found = DEFAULT_SECONDS if text is None else float(text)
    except ValueError:
        found = 0.0
    if not 1.0 <= found <= 86400.0:
        raise UsageError(
            f"{LEASE_SECONDS_VARIABLE} = {text} is not in 1 to 86400 seconds; unset it for 60"
        )
    return found


@dataclass(frozen=True)
class Fence:
    """Tells a holder whether it still is. May travel to other processes that write for it."""

    place: str
    token: str

    def holds(self) -> bool:
        """Opens the file anew, so that no cache of the file system answers."""
        found = read_lease(self.place)
        return found is not None and found.held and found.facts.get("token") == self.token

    def __call__(self) -> None:
        """Raises LeaseLost if another process has taken over."""
        if not self.holds():
            text = f"{self.place} is not held any more: it was silent for too long"
            raise LeaseLost(f"{text}, and another process may go on with the work")


@dataclass(frozen=True)
class LeaseState:
    """What a lease file says; ``facts`` are empty if it is not written yet."""

    text: str
    held: bool
    facts: dict[str, Any]


def read_lease(place: str) -> LeaseState | None:
    """A lease file as it is now; None if there is none."""
    try:
        with open(place, encoding="utf-8", errors="replace") as file:
            text = file.read(2000)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(_cannot_lock(place, error)) from None
    match = _LEASE_LINE.match(text)
    try:
        facts = json.loads(match.group(3)) if match else {}
    except ValueError:
        facts = {}
    return LeaseState(text, match is None or match.group(1) == "held", facts)


def highest_number(path: Path) -> int:
    """The number that counts, 0 if there is none yet."""
    return max(_list_numbers(path), default=0)


def lease_path(path: Path, number: int) -> str:
    return f"{path}.{number}"


def is_lease_file(path: Path, name: str) -> bool:
    """Whether a file called ``name`` in the folder of ``path`` is of that lock."""
    return name.startswith(f"{path.name}.") and name[len(path.name) + 1 :].isdecimal()


def create_lease(path: Path, number: int) -> Fence | None:
    """Makes the file of this number; None if another process was first.

    Raises:
        StoreError: it cannot be written.
    """
    place, token = lease_path(path, number), secrets.token_hex(8)
    facts = {"token": token, "seconds": lease_seconds(), "since": _utc_now(), **process_identity()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(_cannot_lock(place, error)) from None
    try:
        handle = os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return None
    except OSError as error:
        raise StoreError(_cannot_lock(place, error)) from None
    try:
        try:
            os.write(handle, f"held {0:012d} {json.dumps(facts)}\n".encode())
        finally:
            os.close(handle)
        numbers = _list_numbers(path)
        if max(numbers, default=0) > number:  # what we had looked at was long out of date
            _unlink_if_exists(place)  # unless a later holder, which removes all below its own, has
            return None
        for older in sorted(numbers):  # upwards: while one is there, so are all above it
            if older < number:
                _unlink_if_exists(lease_path(path, older))
    except OSError as error:
        _unlink_if_exists(place)
        raise StoreError(_cannot_lock(place, error)) from None
    return Fence(place, token)


def write_heartbeat(fence: Fence, state: str, beat: int) -> bool:
    """Says ``held`` or ``free`` in a holder's own file; False if it is there no more."""
    try:
        handle = os.open(fence.place, os.O_WRONLY)
    except FileNotFoundError:
        return False
    try:
        os.pwrite(handle, f"{state} {beat:012d}".encode(), 0)
    finally:
        os.close(handle)
    return True


def remove_lease(fence: Fence) -> None:
    """Takes the file away: only of a lock whose path nobody else ever asks for."""
    _unlink_if_exists(fence.place)


@dataclass
class _Observation:
    text: str
    at: float
    silent: float = 0.0


_observations: dict[str, _Observation] = {}  # by the lock's path: what this process last saw there


def is_held(path: Path, number: int | None = None) -> bool:
    """Whether some process holds the lock, as far as this one can tell yet.

    One on another machine counts as gone only after this process has looked again and again for
    as long as the holder gave itself. ``number`` is the highest, if it is known.
    """
    number = highest_number(path) if number is None else number
    found = read_lease(lease_path(path, number)) if number else None
    if found is None:  # none yet; or gone since it was listed: taken by another
        return number > 0
    if not found.held or is_process_dead(found.facts):
        _observations.pop(str(path), None)
        return False
    return not _is_silent(str(path), found)


def _is_silent(key: str, found: LeaseState) -> bool:
    limit, moment = float(found.facts.get("seconds", DEFAULT_SECONDS)), time.monotonic()
    look = _observations.get(key)
    if look is None or look.text != found.text:
        _observations[key] = _Observation(found.text, moment)
        return False
    # A long gap counts little: this process may have been suspended with the holder.
    look.silent += min(moment - look.at, limit / 4)
    look.at = moment
    return look.silent >= limit


def describe_holder(path: Path) -> str:
    """Who holds the lock, for people."""
    number = highest_number(path)
    found = read_lease(lease_path(path, number)) if number else None
    if found is None or "pid" not in found.facts:
        return "another process"
    facts = found.facts
    where = "" if facts["host"] == process_identity()["host"] else f" on {facts['host']}"
    return f"process {facts['pid']}{where} since {facts['since']}"


def _list_numbers(path: Path) -> list[int]:
    try:
        names = os.listdir(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(_cannot_lock(path, error)) from None
    return [int(name.rpartition(".")[2]) for name in names if is_lease_file(path, name)]


def _unlink_if_exists(place: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(place)


def _utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _cannot_lock(path: str | Path, error: OSError) -> str:
    return f"{path} cannot be locked: {error.strerror}; check the folder's rights and the disk"


# One process among all processes of all machines, and whether another one is dead.
#
# Host name, boot and process-id namespace say whether two processes see the same process table: in
# containers of one machine they need not.


@cache
def _process_identity(pid: int) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": _read_text("/proc/sys/kernel/random/boot_id") or f"{uuid.getnode():x}",
        "space": _read_link("/proc/self/ns/pid"),
        "pid": pid,
        "born": _process_state(pid)[1],
    }


def process_identity() -> dict[str, Any]:
    """This process among all processes of all machines."""
    return _process_identity(os.getpid())


def is_process_dead(facts: dict[str, Any]) -> bool:
    """Whether a holder's process is known to be dead: only on this machine can it be."""
    ours = process_identity()
    if any(facts.get(name) != ours[name] for name in ("host", "boot", "space")):
        return False
    try:
        os.kill(int(facts["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's, and alive
        return False
    state, born = _process_state(int(facts["pid"]))
    return state in ("Z", "X") or (born != "" and facts["born"] != "" and born != facts["born"])


def _process_state(pid: int) -> tuple[str, str]:
    """State and start time of a process, in ticks since the machine's; empty where unknown."""
    fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
