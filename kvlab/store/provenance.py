"""Where a run came from: captured once in the driver, and carried to every worker.

Workers cannot find it themselves: a version-control folder does not travel with the code.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import kvlab


@dataclass(frozen=True)
class Origin:
    """Who asked for a trial.

    Attributes:
        commit: of the kvlab that runs, None outside a checkout.
        dirty: whether tracked files differ from it.
        command: as typed, without absolute paths.
        stop_flag: path of the file whose presence asks the trial to stop, whoever started it.
        own_stop_flag: of the file that asks only trials of the same driver to stop.
    """

    commit: str | None = None
    dirty: bool | None = None
    command: str = ""
    stop_flag: str | None = None
    own_stop_flag: str | None = None


def capture_origin(
    command: str = "",
    stop_flag: str | Path | None = None,
    own_stop_flag: str | Path | None = None,
) -> Origin:
    """The origin of trials started by this process."""
    commit, dirty = read_git_state(Path(kvlab.__file__).parent)
    flags = (None if flag is None else str(flag) for flag in (stop_flag, own_stop_flag))
    return Origin(commit, dirty, command, *flags)


def read_git_state(package: Path) -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout that tracks ``package``; (None, None) if none does.

    An installed package may lie inside some other project's checkout, as in its virtual
    environment: that project's commit says nothing about this code.
    """
    status = _git(package, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if status is None or _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    lines = status.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    return commit, any(not line.startswith("#") for line in lines)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def redact_command(arguments: Sequence[str]) -> str:
    """``kvlab`` and its arguments, absolute paths as seen from the working folder or by name."""
    return " ".join(["kvlab", *map(_redact_argument, arguments)])


def _redact_argument(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    inside = path.is_relative_to(Path.cwd())
    return f"{option}{equals}{path.relative_to(Path.cwd()) if inside else path.name}"


_ABSOLUTE_FOLDERS = re.compile(r"(?<![\w./~:<-])/(?:[^\s/'\"<>|:;,()]+/)+(?=[^\s/])")
"""The folders of an absolute path, of which the last name is kept. Not of an address."""


def redact_paths(text: str) -> str:
    """``text`` without this machine's folders, for tracebacks and messages that are kept.

    Paths inside kvlab, its packages and the home folder stay as seen from there; of any other
    absolute path, which may name a person, the last name stays.
    """
    places = {
        os.path.dirname(os.path.dirname(os.path.abspath(kvlab.__file__))): "",
        os.path.join(sys.prefix, "lib"): "",
        os.path.join(sys.base_prefix, "lib"): "",
        os.path.expanduser("~"): "~/",
    }
    for place in sorted(places, key=len, reverse=True):
        if len(place) > 1:
            text = text.replace(place + os.sep, places[place])
    return _ABSOLUTE_FOLDERS.sub("", text)


# What a result needs to be made again: code, versions, device, data. No host or user names.


PACKAGES = ("torch", "numpy", "ray", "tiktoken", "safetensors", "pydantic")


@dataclass(frozen=True)
class DataProvenance:
    """The text that was used: what was planned, what was read, and on which terms."""

    identity: str
    digest: str
    licence: str
    tokenizer: str


@dataclass(frozen=True)
class Machine:
    """What ran it, by kind and never by name.

    ``timings``: ``exclusive``, or ``shared`` if something else used the device, or the cores
    beside it, while speed was measured.
    """

    device: str
    threads: int
    timings: Literal["exclusive", "shared"] = "exclusive"


def build_provenance(
    origin: Origin,
    *,
    started: str,
    attempts: int,
    pauses: int = 0,
    machine: Machine | None = None,
    data: DataProvenance | None = None,
) -> dict[str, Any]:
    """The ``provenance`` of a result; ``machine`` and ``data`` are None if it failed before.

    Of the attempts ``pauses`` ended at a rung of a search; the key is there only if any did.
    """
    return {
        "commit": origin.commit,
        "dirty": origin.dirty,
        "kvlab": kvlab.__version__,
        "python": platform.python_version(),
        "versions": dict(package_versions()),
        "device": machine.device if machine else None,
        "threads": machine.threads if machine else None,
        "timings": machine.timings if machine else None,
        "data": asdict(data) if data else None,
        "command": origin.command,
        "started": started,
        "finished": utc_now(),
        "attempts": attempts,
        **({"pauses": pauses} if pauses else {}),
    }


@cache
def package_versions() -> dict[str, str]:
    """Versions of the packages that computed the numbers, without importing them."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def utc_now() -> str:
    """UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
