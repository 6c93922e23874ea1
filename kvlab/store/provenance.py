"""What a result needs to be made again: code, versions, device, data. No host or user names.

The code version and the command are captured in the driver and sent to every worker: a worker
has no version-control folder to read them from.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import kvlab
from kvlab.spec.dtypes import MODEL_DTYPE

PACKAGES = ("torch", "numpy", "ray", "tiktoken", "safetensors", "pydantic")
"""Those that compute the numbers."""


@dataclass(frozen=True)
class Origin:
    """The driver that started a trial.

    Attributes:
        commit: of the kvlab that runs; None outside a checkout.
        dirty: whether tracked files differ from it.
        command: as typed, without absolute paths.
        code: digests of the code that its trials are to run; None if they may run any. See
            `kvlab.trial.code_identity`.
    """

    commit: str | None = None
    dirty: bool | None = None
    command: str = ""
    code: Mapping[str, str] | None = None


def capture_origin(command: str, code: Mapping[str, str] | None) -> Origin:
    """Return the origin of trials that this process starts."""
    return Origin(*read_git_state(Path(kvlab.__file__).parent), command, code)


def read_git_state(package: Path) -> tuple[str | None, bool | None]:
    """Return commit and dirty flag of the checkout that tracks ``package``, else (None, None).

    An installed package may lie inside another project's checkout, as in its virtual
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
        process = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None


@dataclass(frozen=True)
class DataProvenance:
    """The text that was used: its identity (`kvlab.data.dataset_identity`), digest and licence.

    ``digest`` is that of its tokens, and part of the trial's fingerprint. ``overlap`` is the share
    of its held-out tokens inside an n-gram of its training text, by n.
    """

    identity: str
    digest: str
    licence: str
    tokenizer: str
    overlap: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """The kind of machine that ran a trial.

    ``timings`` is ``shared`` if something else used the device, or the cores beside it, while
    speed was measured, otherwise ``exclusive``. ``weights`` is the dtype of the weights that were
    evaluated and benchmarked.
    """

    device: str
    threads: int
    timings: Literal["exclusive", "shared"] = "exclusive"
    weights: str = MODEL_DTYPE


def build_provenance(
    origin: Origin,
    *,
    started: str,
    attempts: int,
    pauses: int = 0,
    machine: Machine | None = None,
    data: DataProvenance | None = None,
    code: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the ``provenance`` of a result.

    Args:
        started: time of the last attempt's start, see `utc_now`.
        attempts: how often the trial was started.
        pauses: attempts that ended as planned; see `Store.count_pauses`. The key is left out if
            there are none.
        machine: None if the trial failed before it was known.
        data: None if the trial failed before it was known.
        code: see `kvlab.trial.trial.describe_origin`.
    """
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "commit": origin.commit,
        "dirty": origin.dirty,
        **({"code": dict(code)} if code else {}),
        "kvlab": kvlab.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "device": machine.device if machine else None,
        "threads": machine.threads if machine else None,
        "timings": machine.timings if machine else None,
        "kernels": os.environ.get("KVLAB_PLAIN", "") in ("", "0"),  # as in kvlab.model.kernels
        **({"weights": machine.weights} if machine and machine.weights != MODEL_DTYPE else {}),
        "data": asdict(data) if data else None,
        "command": origin.command,
        "started": started,
        "finished": utc_now(),
        "attempts": attempts,
        **({"pauses": pauses} if pauses else {}),
    }


def describe_device(provenance: Mapping[str, Any]) -> str:
    """Return the device of a result, with the dtype of its weights unless that is float32."""
    weights = provenance.get("weights")
    return f"{provenance.get('device')}{f', weights in {weights}' if weights else ''}"


def utc_now() -> str:
    """Return the time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_ABSOLUTE_FOLDERS = re.compile(r"(?<![\w./~:<-])/(?:[^\s/'\"<>|:;,()]+/)+(?=[^\s/])")
"""The folders of an absolute path before its last name; does not match URLs."""


def redact_paths(text: str) -> str:
    """Return ``text`` without this machine's folders, for tracebacks and messages.

    Paths inside kvlab, its packages and the home folder are kept relative to these. Of any other
    absolute path, which may name a person, the last name is kept.
    """
    prefixes = {
        os.path.dirname(os.path.dirname(os.path.abspath(kvlab.__file__))): "",
        os.path.join(sys.prefix, "lib"): "",
        os.path.join(sys.base_prefix, "lib"): "",
        os.path.expanduser("~"): "~/",
    }
    for prefix in sorted(prefixes, key=len, reverse=True):
        if len(prefix) > 1:
            text = text.replace(prefix + os.sep, prefixes[prefix])
    return _ABSOLUTE_FOLDERS.sub("", text)
