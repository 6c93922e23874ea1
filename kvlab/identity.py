"""One process among all processes of all machines, and whether another one is dead.

Host name, boot and process-id namespace say whether two processes see the same process table: in
containers of one machine they need not.
"""

import os
import socket
import uuid
from functools import cache
from typing import Any


@cache
def _identity_of(pid: int) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": _contents("/proc/sys/kernel/random/boot_id") or f"{uuid.getnode():x}",
        "space": _link("/proc/self/ns/pid"),
        "pid": pid,
        "born": _process(pid)[1],
    }


def identity() -> dict[str, Any]:
    """This process among all processes of all machines."""
    return _identity_of(os.getpid())


def is_dead(facts: dict[str, Any]) -> bool:
    """Whether a holder's process is known to be dead: only on this machine can it be."""
    ours = identity()
    if any(facts.get(name) != ours[name] for name in ("host", "boot", "space")):
        return False
    try:
        os.kill(int(facts["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's, and alive
        return False
    state, born = _process(int(facts["pid"]))
    return state in ("Z", "X") or (born != "" and facts["born"] != "" and born != facts["born"])


def _process(pid: int) -> tuple[str, str]:
    """State and start time of a process, in ticks since the machine's; empty where unknown."""
    fields = _contents(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def _contents(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
