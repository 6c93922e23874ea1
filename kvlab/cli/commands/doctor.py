"""`kvlab doctor`: what is installed and usable here, and what to do about each gap."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from kvlab.cli.shared_arguments import add_json, add_store
from kvlab.data import get_data_dir, list_prepared_datasets
from kvlab.data.hellaswag_dataset import find_hellaswag_file
from kvlab.errors import StoreError
from kvlab.fs.atomic_files import write_atomic
from kvlab.fs.lock import Lock
from kvlab.humanize import format_bytes

_MARKS = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    found = list(run_checks(options.store))
    if options.json:
        print(json.dumps([asdict(check) for check in found], indent=1))
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            print(f"{_MARKS[check.state]}  {check.name:<{width}}  {check.found}")
            if check.way_out:
                print(f"{'':<{width + 9}}-> {check.way_out}")
    return int(any(check.state == "wrong" for check in found))


# What `kvlab doctor` looks at: one function a check, each with what to do about a gap.


CheckState = Literal["ok", "note", "wrong"]

MIN_FREE_BYTES = 2 * 10**9

PACKAGES = {
    "torch": "trains and measures",
    "ray": "runs several trials at once; without it use --executor inline",
    "mlflow": "browses results; without it the record and the reports are all there",
    "optuna": "searches; needed by sweeps with `search:` alone",
    "numpy": "reads the tokens",
    "tiktoken": "makes tokens of text",
    "scipy": "makes the intervals of reports",
    "matplotlib": "draws the figures of reports",
}


JOB_SERVER_MODULES = ("aiohttp_cors", "grpc", "opencensus", "prometheus_client")
"""Modules that ray[default] brings, without which a head's dashboard takes no jobs."""


@dataclass(frozen=True)
class Check:
    """One thing looked at; ``way_out`` is empty where nothing is to be done."""

    name: str
    state: CheckState
    found: str
    way_out: str = ""


def run_checks(store: str) -> Iterator[Check]:
    """Every check, one after the other; none raises and none leaves anything behind."""
    yield _check_python()
    yield from _check_packages()
    yield _check_processor()
    yield from _check_gpus()
    yield _check_writable("store", Path(store), "--store or KVLAB_STORE")
    yield _check_writable("data folder", get_data_dir(), "KVLAB_DATA")
    yield _check_datasets()
    yield _check_hellaswag()
    yield _check_mlflow()
    yield _check_job_server()


def _check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info < (3, 13):
        return Check("python", "ok", version)
    return Check("python", "wrong", version, "use Python 3.11 or 3.12")


def _check_packages() -> Iterator[Check]:
    for name, purpose in PACKAGES.items():
        try:
            yield Check(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            state: CheckState = "wrong" if name in ("torch", "numpy", "tiktoken") else "note"
            yield Check(name, state, f"not installed; it {purpose}", f"pip install {name}")


def _check_processor() -> Check:
    import psutil

    from kvlab.sweep.executors.capacity import cpu_count

    memory = psutil.virtual_memory()
    text = f"{cpu_count()} cores, {format_bytes(memory.available)} of {format_bytes(memory.total)}"
    return Check("processor", "ok", f"{text} memory free")


def _check_gpus() -> Iterator[Check]:
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
        memory = f"{format_bytes(free)} of {format_bytes(total)} memory free"
        yield Check(f"GPU {index}", "ok", f"{facts.name}, {memory}")


def _check_writable(name: str, folder: Path, setting: str) -> Check:
    """Whether files can be made, locked and renamed there; the folder itself is not made."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    way_out = f"choose another with {setting}, or mend its rights"
    if not place.is_dir():
        return Check(name, "wrong", f"{place} is a file", way_out)
    try:
        with tempfile.TemporaryDirectory(prefix=".kvlab-doctor-", dir=place) as scratch:
            _try_files(Path(scratch))
    except (OSError, StoreError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return Check(name, "wrong", f"{folder} cannot be used: {reason}", way_out)
    free = shutil.disk_usage(place).free
    found = f"{folder} is writable, {format_bytes(free)} free"
    if free < MIN_FREE_BYTES:
        return Check(name, "note", found, "free some space: checkpoints take three times a model")
    return Check(name, "ok", found)


def _try_files(folder: Path) -> None:
    with Lock(folder / "lock").hold():
        write_atomic(folder / "file", "")


def _check_datasets() -> Check:
    found = list_prepared_datasets()
    if found:
        return Check("text", "ok", f"{len(found)} prepared in {get_data_dir()}")
    way_out = (
        "none needed: it is prepared at first use; or now, with `kvlab data prepare EXPERIMENT`"
    )
    return Check("text", "note", "none prepared yet", way_out)


def _check_hellaswag() -> Check:
    path = find_hellaswag_file()
    if path is not None:
        return Check("HellaSwag", "ok", f"in {path.parent}")
    way_out = "none needed without evaluation.hellaswag; else `kvlab data get hellaswag`"
    return Check("HellaSwag", "note", "not here yet", way_out)


def _check_mlflow() -> Check:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        return Check("MLflow", "ok", "a database in the store (MLFLOW_TRACKING_URI is not set)")
    return Check("MLflow", "note", f"MLFLOW_TRACKING_URI = {uri}; `kvlab sync` tries it")


def _check_job_server() -> Check:
    lacking = [name for name in JOB_SERVER_MODULES if importlib.util.find_spec(name) is None]
    if not lacking:
        return Check("job server", "ok", "a Ray head here takes `submit --detach` from elsewhere")
    way_out = "none needed, but on a cluster's head: pip install 'kvlab[cluster]'"
    return Check("job server", "note", f"Ray's needs {', '.join(lacking)}", way_out)
