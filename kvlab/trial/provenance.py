"""What a result needs to be made again: code, versions, device, data. No host or user names."""

import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import kvlab
from kvlab.trial.origin import Origin

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


def provenance(
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
        "versions": dict(installed_versions()),
        "device": machine.device if machine else None,
        "threads": machine.threads if machine else None,
        "timings": machine.timings if machine else None,
        "data": asdict(data) if data else None,
        "command": origin.command,
        "started": started,
        "finished": now(),
        "attempts": attempts,
        **({"pauses": pauses} if pauses else {}),
    }


@cache
def installed_versions() -> dict[str, str]:
    """Versions of the packages that computed the numbers, without importing them."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def now() -> str:
    """UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
