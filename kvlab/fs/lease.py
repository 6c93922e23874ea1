"""Leases: exclusive ownership agreed on through files in a shared folder.

A lock at ``path`` is a series of numbered files, ``path.1``, ``path.2``, ...; only the highest
number counts. Its file says ``free``, or ``held`` with the holder's heartbeat, a counter. A process
that finds the lock free, or its holder gone, creates the next number with ``O_EXCL``, which only
one process can do, and then removes the lower numbers. A number is never used twice, so a holder
that was given up on, such as a suspended machine, finds its own file missing.

A holder is gone if its process is dead, which only a process on the same machine can see, or if
its heartbeat has not changed for as long as the holder itself declared, measured by the watcher's
monotonic clock. Clocks of different machines are never compared.

The file system must support exclusive creation, and a file that is opened must have the contents
of its last close (NFS's close-to-open consistency). ``flock`` needs more: Lustre and many network
mounts do not support it, or restrict it to one machine without an error; NFS can keep the lock of
a machine that is lost; and none of them tells a holder that it has lost its lock.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from kvlab.errors import LeaseLost, StoreError, UsageError

_LEASE_LINE = re.compile(r"(held|free) (\d{12}) (\{.*\})\s*\Z")
ProcessIdentity = dict[str, Any]
"""As `process_identity` returns it; in a lease also its token, duration and start."""


def read_seconds(variable: str, default: float, most: float = 86400.0) -> float:
    """Return a time that an environment variable may set.

    Raises:
        UsageError: It is not a number from 1 to ``most``.
    """
    text = os.environ.get(variable)
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= most:
        rule = f"is not in 1 to {most:.0f} seconds; unset it for {default:g}"
        raise UsageError(f"{variable} = {text} {rule}")
    return seconds


lease_seconds = partial(read_seconds, "KVLAB_LEASE_SECONDS", 60.0)
"""How long this process's heartbeats may fail before others take over its locks."""


@dataclass(frozen=True)
class Fence:
    """Proof of ownership, to be checked before each write that only the holder may do.

    It can be pickled and sent to processes that write on the holder's behalf.
    """

    path: str
    token: str

    def holds(self) -> bool:
        """Return whether the lease is still held. Reopens the file, so caches are bypassed."""
        state = read_lease(self.path)
        return state is not None and state.is_held and state.holder.get("token") == self.token

    def check(self) -> None:
        """Raise LeaseLost if another process has taken over."""
        if not self.holds():
            text = f"{self.path} is not held any more: this process was silent for too long"
            raise LeaseLost(f"{text}, and another process may continue the work")


@dataclass(frozen=True)
class LeaseState:
    """The contents of a lease file; ``holder`` is empty if the process has not written it yet."""

    text: str
    is_held: bool
    holder: ProcessIdentity


def read_lease(path: str) -> LeaseState | None:
    """Read a lease file; return None if it does not exist.

    Anything else (a link, a pipe, a folder, other text) is a lease without a known holder: a
    watcher gives it up after its own `lease_seconds` without a change.
    """
    with _explain_errors(path):
        try:
            # not blocking: something else than a file, such as a pipe, would never answer
            extra = os.O_NONBLOCK | os.O_NOFOLLOW
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | extra)) as file:
                text = file.read(2000).decode(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR):  # a link, a folder
                raise
            text = ""
    match = _LEASE_LINE.match(text)
    holder = _parse_holder(match[3]) if match else {}
    return LeaseState(text, match is None or match[1] == "held", holder)


def _parse_holder(text: str) -> ProcessIdentity:
    """Return what a holder wrote about itself; empty if any of it has another form."""
    try:
        holder: ProcessIdentity = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    texts = [holder.get(key) for key in ("token", "since", "host", "boot", "space", "born")]
    seconds, pid = holder.get("seconds"), holder.get("pid")
    is_number = isinstance(seconds, int | float) and 1.0 <= seconds <= 86400.0
    is_whole = is_number and type(pid) is int and pid > 0
    return holder if is_whole and all(isinstance(text, str) for text in texts) else {}


def current_number(path: Path) -> int:
    """Return the number of the lock's current lease file, 0 if there is none."""
    return max(_list_numbers(path), default=0)


def lease_path(path: Path, number: int) -> str:
    return f"{path}.{number}"


def read_current_lease(path: Path) -> LeaseState | None:
    """Read the current lease of the lock at ``path``; None if it was never taken."""
    number = current_number(path)
    return read_lease(lease_path(path, number)) if number else None


def is_lease_file(path: Path, name: str) -> bool:
    """Return whether the file ``name``, in the folder of ``path``, belongs to that lock."""
    return name.startswith(f"{path.name}.") and name[len(path.name) + 1 :].isdecimal()


def create_lease(path: Path, number: int) -> Fence | None:
    """Create the lease file ``number``; return None if another process was first.

    Raises:
        StoreError: The file cannot be written.
    """
    file_path, token = lease_path(path, number), secrets.token_hex(8)
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    holder = {"token": token, "seconds": lease_seconds(), "since": since, **process_identity()}
    with _explain_errors(file_path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(file_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return None
        try:
            with open(handle, "wb") as file:  # all or an error; `os.write` may write a part
                file.write(f"held {0:012d} {json.dumps(holder)}\n".encode())
            numbers = sorted(_list_numbers(path))
            if numbers and numbers[-1] > number:  # our view of the folder was out of date
                # the later holder may have removed it already
                Path(file_path).unlink(missing_ok=True)
                return None
            # In ascending order: as long as one number exists, all above it do.
            for older in (n for n in numbers if n < number):
                if not os.path.isdir(lease_path(path, older)):  # no lease, so it may stay
                    Path(lease_path(path, older)).unlink(missing_ok=True)
        except (OSError, StoreError):
            Path(file_path).unlink(missing_ok=True)
            raise
    return Fence(file_path, token)


def write_heartbeat(fence: Fence, state: str, count: int) -> bool:
    """Write ``held`` or ``free`` and the heartbeat's count; return False if the file is gone."""
    try:
        with open(fence.path, "rb+", buffering=0) as file:
            file.write(f"{state} {count:012d}".encode())
    except FileNotFoundError:
        return False
    return True


class LeaseWatcher:
    """Decide whether locks are held, from how long their heartbeats have been silent.

    A holder on another machine counts as gone only after one watcher has looked repeatedly for as
    long as that holder declared.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[str, float, float]] = {}  # text, time, seconds of silence

    def is_held(self, path: Path, number: int | None = None) -> bool:
        """Return whether some process holds the lock at ``path``, as far as is known yet.

        Args:
            number: Number of the current lease file, if the caller has just listed it.
        """
        number = current_number(path) if number is None else number
        state = read_lease(lease_path(path, number)) if number else None
        if state is None:  # never taken; or removed since it was listed, by its next holder
            return number > 0
        if not state.is_held or is_process_dead(state.holder):
            self._seen.pop(path, None)
            return False
        limit, now = float(state.holder.get("seconds") or lease_seconds()), time.monotonic()
        text, seen_at, silent = self._seen.get(path, ("", now, 0.0))
        # A long gap counts little: this process may have been suspended together with the holder.
        silent = silent + min(now - seen_at, limit / 4) if text == state.text else 0.0
        self._seen[path] = state.text, now, silent
        return silent < limit

    def free_if_abandoned(self, path: Path) -> bool:
        """Free the lock if its holder is gone; return whether it is free.

        Other processes then need not watch it as long as this watcher did.
        """
        number = current_number(path)
        if self.is_held(path, number):
            return False
        state = read_lease(lease_path(path, number)) if number else None
        if state is None or not state.is_held:
            return True
        fence = create_lease(path, number + 1)
        return fence is not None and write_heartbeat(fence, "free", 0)


def process_identity() -> ProcessIdentity:
    """Return data that no other process on any machine has.

    Two processes see the same process table if host name, boot id and process-id namespace are
    equal; containers of one machine may differ.
    """
    return _process_identity(os.getpid())


@cache
def _process_identity(pid: int) -> ProcessIdentity:
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return {
        "host": socket.gethostname(),
        "boot": _read_text("/proc/sys/kernel/random/boot_id") or f"{uuid.getnode():x}",
        "space": space,
        "pid": pid,
        "born": _process_state(pid)[1],
    }


def is_process_visible(identity: ProcessIdentity) -> bool:
    """Return whether a process has the process table of this one."""
    own = process_identity()
    return all(identity.get(name) == own[name] for name in ("host", "boot", "space"))


def is_process_dead(identity: ProcessIdentity) -> bool:
    """Return whether a process is known to be dead; False if it has another process table."""
    if not is_process_visible(identity):
        return False
    try:
        os.kill(int(identity["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's process, alive
        return False
    state, born = _process_state(int(identity["pid"]))
    is_pid_reused = "" not in (born, identity["born"]) and born != identity["born"]
    return state in ("Z", "X", "zombie") or is_pid_reused


def _process_state(pid: int) -> tuple[str, str]:
    """Return state and start time of a process; empty if unknown.

    On Linux the time is in clock ticks since boot, which no setting of the clock changes.
    """
    fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) > 19:
        return fields[0], fields[19]
    with contextlib.suppress(ImportError):  # a machine that only measures may lack it
        import psutil  # macOS has no /proc

        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            return process.status(), str(process.create_time())
    return "", ""


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _list_numbers(path: Path) -> list[int]:
    with _explain_errors(path):
        try:
            names = os.listdir(path.parent)
        except (FileNotFoundError, NotADirectoryError):
            return []
    return [int(name.rpartition(".")[2]) for name in names if is_lease_file(path, name)]


@contextlib.contextmanager
def _explain_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"{path} cannot be locked: {error.strerror}"
        raise StoreError(f"{text}; check the folder's permissions and the disk") from None
