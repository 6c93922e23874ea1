"""What `kvlab doctor` looks at: one function a check, each with what to do about a gap."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvlab.cli.table import short_bytes
from kvlab.data import data_folder, prepared
from kvlab.data.hellaswag_set import find_hellaswag
from kvlab.errors import StoreError
from kvlab.files import write_atomic
from kvlab.lock import Lock

State = Literal["ok", "note", "wrong"]

LEAST_FREE = 2 * 10**9

NEEDED = {
    "torch": "trains and measures",
    "ray": "runs several trials at once; without it use --executor inline",
    "mlflow": "browses results; without it the record and the reports are all there",
    "optuna": "searches; needed by sweeps with `search:` alone",
    "numpy": "reads the tokens",
    "tiktoken": "makes tokens of text",
    "scipy": "makes the intervals of reports",
    "matplotlib": "draws the figures of reports",
}


JOB_SERVER = ("aiohttp_cors", "grpc", "opencensus", "prometheus_client")
"""Modules that ray[default] brings, without which a head's dashboard takes no jobs."""


@dataclass(frozen=True)
class Check:
    """One thing looked at; ``way_out`` is empty where nothing is to be done."""

    name: str
    state: State
    found: str
    way_out: str = ""


def checks(store: str) -> Iterator[Check]:
    """Every check, one after the other; none raises and none leaves anything behind."""
    yield _python()
    yield from _packages()
    yield _processors()
    yield from _devices()
    yield _writable("store", Path(store), "--store or KVLAB_STORE")
    yield _writable("data folder", data_folder(), "KVLAB_DATA")
    yield _data()
    yield _hellaswag()
    yield _server()
    yield _job_server()


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info < (3, 13):
        return Check("python", "ok", version)
    return Check("python", "wrong", version, "use Python 3.11 or 3.12")


def _packages() -> Iterator[Check]:
    for name, purpose in NEEDED.items():
        try:
            yield Check(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            state: State = "wrong" if name in ("torch", "numpy", "tiktoken") else "note"
            yield Check(name, state, f"not installed; it {purpose}", f"pip install {name}")


def _processors() -> Check:
    import psutil

    from kvlab.sweep.executors.machine import cpu_count

    memory = psutil.virtual_memory()
    text = f"{cpu_count()} cores, {short_bytes(memory.available)} of {short_bytes(memory.total)}"
    return Check("processor", "ok", f"{text} memory free")


def _devices() -> Iterator[Check]:
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        yield Check("GPU", "note", "none visible; experiments with resources.gpus need one")
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{short_bytes(free)} of {short_bytes(total)} memory free"
        yield Check(f"GPU {index}", "ok", f"{facts.name}, {memory}")


def _writable(name: str, folder: Path, setting: str) -> Check:
    """Whether files can be made, locked and renamed there; the folder itself is not made."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    way_out = f"choose another with {setting}, or mend its rights"
    if not place.is_dir():
        return Check(name, "wrong", f"{place} is a file", way_out)
    try:
        with tempfile.TemporaryDirectory(prefix=".kvlab-doctor-", dir=place) as scratch:
            _use(Path(scratch))
    except (OSError, StoreError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return Check(name, "wrong", f"{folder} cannot be used: {reason}", way_out)
    free = shutil.disk_usage(place).free
    found = f"{folder} is writable, {short_bytes(free)} free"
    if free < LEAST_FREE:
        return Check(name, "note", found, "free some space: checkpoints take three times a model")
    return Check(name, "ok", found)


def _use(folder: Path) -> None:
    with Lock(folder / "lock").hold():
        write_atomic(folder / "file", "")


def _data() -> Check:
    found = prepared()
    if found:
        return Check("text", "ok", f"{len(found)} prepared in {data_folder()}")
    way_out = (
        "none needed: it is prepared at first use; or now, with `kvlab data prepare EXPERIMENT`"
    )
    return Check("text", "note", "none prepared yet", way_out)


def _hellaswag() -> Check:
    path = find_hellaswag()
    if path is not None:
        return Check("HellaSwag", "ok", f"in {path.parent}")
    way_out = "none needed without evaluation.hellaswag; else `kvlab data get hellaswag`"
    return Check("HellaSwag", "note", "not here yet", way_out)


def _server() -> Check:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        return Check("MLflow", "ok", "a database in the store (MLFLOW_TRACKING_URI is not set)")
    return Check("MLflow", "note", f"MLFLOW_TRACKING_URI = {uri}; `kvlab sync` tries it")


def _job_server() -> Check:
    lacking = [name for name in JOB_SERVER if importlib.util.find_spec(name) is None]
    if not lacking:
        return Check("job server", "ok", "a Ray head here takes `submit --detach` from elsewhere")
    way_out = "none needed, but on a cluster's head: pip install 'kvlab[cluster]'"
    return Check("job server", "note", f"Ray's needs {', '.join(lacking)}", way_out)
