"""`kvlab doctor`: check whether kvlab can run here, with a hint for each gap."""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import psutil

from kvlab.cli.shared_arguments import add_record
from kvlab.data.data_dir import get_data_dir
from kvlab.data.dataset_preparation import list_prepared_datasets
from kvlab.data.hellaswag_dataset import find_hellaswag_file
from kvlab.errors import KvlabError, StoreError
from kvlab.fs.atomic_files import write_atomic
from kvlab.fs.lock import Lock
from kvlab.humanize import format_bytes, redact_url, summarize_error
from kvlab.machine import cpu_count, host_memory
from kvlab.sweep.executors import make_executor

MIN_FREE_BYTES = 2 * 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_record(parser)


def run(options: argparse.Namespace) -> int:
    checks = []
    for check in run_checks(Path(options.store).absolute()):
        checks.append(check)
        if not options.json:  # at once: Ray takes seconds to start
            mark = check.state.upper() if check.state == "wrong" else check.state
            print(f"{mark:<5}  {check.name:<11}  {check.found}", flush=True)
            if check.way_out:
                print(f"{'':<20}-> {check.way_out}")
    if options.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    return int(any(check.state == "wrong" for check in checks))


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        found: What is there, or what is wrong.
        way_out: What to do about it; empty if there is nothing to do.
    """

    name: str
    state: Literal["ok", "note", "wrong"]
    found: str
    way_out: str = ""


def run_checks(store: Path) -> Iterator[Check]:
    """Run every check. None raises an error, and none leaves files behind."""
    version, fits = platform.python_version(), (3, 11) <= sys.version_info < (3, 15)
    yield Check("python", "ok" if fits else "wrong", version, "" if fits else "use 3.11 to 3.14")
    yield from _check_torch()
    most = host_memory()
    free, total = map(format_bytes, (min(psutil.virtual_memory().available, most), most))
    yield Check("machine", "ok", f"{cpu_count()} cores, {free} of {total} memory free")
    yield _check_ray()
    yield _check_folder("store", store, "--store or KVLAB_STORE")
    yield _check_folder("data folder", get_data_dir().absolute(), "KVLAB_DATA")
    yield _check_mlflow(store)
    count, hellaswag = len(list_prepared_datasets()), find_hellaswag_file()
    hint = "" if count else "prepared at first use; or now, with `kvlab data prepare EXPERIMENT`"
    yield Check("text", "ok" if count else "note", f"{count} prepared in {get_data_dir()}", hint)
    hint = "" if hellaswag else "needed by evaluation.hellaswag: `kvlab data get hellaswag`"
    place = f"in {hellaswag.parent}" if hellaswag else "not here"
    yield Check("HellaSwag", "ok" if hellaswag else "note", place, hint)


def _check_torch() -> Iterator[Check]:
    """Check torch, and the GPUs that it sees or should see."""
    try:
        import torch
    except ModuleNotFoundError:
        yield Check("torch", "wrong", "not installed; it trains and measures", "pip install torch")
        return
    except (ImportError, OSError) as error:  # of a library that it needs
        yield Check("torch", "wrong", summarize_error(error), "install torch anew")
        return
    yield Check("torch", "ok", torch.__version__)
    for index in range(torch.cuda.device_count()):
        try:
            free, total = map(format_bytes, torch.cuda.mem_get_info(index))
            name = torch.cuda.get_device_properties(index).name
            yield Check(f"GPU {index}", "ok", f"{name}, {free} of {total} memory free")
        except RuntimeError as error:
            hint = "see what nvidia-smi says of it; hide it with CUDA_VISIBLE_DEVICES"
            yield Check(f"GPU {index}", "wrong", summarize_error(error), hint)
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), None)
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            text = "no Triton, which training.compile and kernels of kvlab need"
            yield Check("compiler", "wrong", text, "pip install triton")
        elif compiler is None or shutil.which(compiler) is None:
            text = "no C compiler, which Triton needs"
            yield Check("compiler", "wrong", text, "install gcc, or name one with CC")
        else:
            yield Check("compiler", "ok", f"Triton, with {compiler}")
    elif shutil.which("nvidia-smi") is None:
        is_apple = torch.backends.mps.is_available()
        found = "Apple's, which kvlab does not use" if is_apple else "none visible"
        yield Check("GPU", "note", f"{found}; experiments with resources.gpus need a CUDA device")
    else:
        cuda = torch.version.cuda
        built = f"CUDA {cuda}" if cuda else "CPU"
        text = f"an NVIDIA driver is here, and torch {torch.__version__} for {built} sees no GPU"
        hint = "pip install a torch for the CUDA that nvidia-smi shows; unset CUDA_VISIBLE_DEVICES"
        yield Check("GPU", "wrong", text, hint)


def _check_ray() -> Check:
    """Start a local cluster, as `kvlab submit` does, and end it."""
    hint = "use --executor inline, which runs one trial after the other without Ray"
    if importlib.util.find_spec("ray") is None:
        return Check("ray", "note", "not installed; it runs several trials at once", hint)
    try:
        executor = make_executor("ray", lambda _: "done")
    except KvlabError as error:
        return Check("ray", "wrong", str(error), hint)
    executor.close()
    return Check("ray", "ok", "a local cluster starts")


def _make_scratch(folder: Path) -> "TemporaryDirectory[str]":
    """Return a new folder in ``folder``, or in the nearest one above it that exists."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return TemporaryDirectory(prefix=".kvlab-doctor-", dir=existing)


def _check_folder(name: str, folder: Path, setting: str) -> Check:
    """Check that files can be written, locked and renamed in ``folder``, without making it."""
    try:
        with _make_scratch(folder) as scratch, Lock(Path(scratch, "lock")).hold():
            write_atomic(Path(scratch, "file"), "")
            free = shutil.disk_usage(scratch).free
    except (OSError, StoreError) as error:
        hint = f"choose another with {setting}, or change its permissions"
        return Check(name, "wrong", f"{folder} cannot be used: {error}", hint)
    is_full = free < MIN_FREE_BYTES
    hint = "free some space: checkpoints take three times a model" if is_full else ""
    finding = f"{folder} is writable, {format_bytes(free)} free"
    return Check(name, "note" if is_full else "ok", finding, hint)


def _check_mlflow(store: Path) -> Check:
    """Check that MLflow is there, and that the file system of the store carries its database."""
    if importlib.util.find_spec("mlflow") is None:
        return Check("MLflow", "note", "not installed; the record and the reports do without it")
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        text = f"MLFLOW_TRACKING_URI = {redact_url(uri)}; `kvlab sync` tries it"
        return Check("MLflow", "note", text)
    try:
        with (
            _make_scratch(store) as scratch,
            closing(sqlite3.connect(Path(scratch, "mlflow.db"))) as database,
        ):
            database.execute("CREATE TABLE a (b)")
    except (OSError, sqlite3.Error) as error:
        hint = "use a server: --tracking-uri or MLFLOW_TRACKING_URI"
        return Check("MLflow", "wrong", f"no database can be made in {store}: {error}", hint)
    return Check("MLflow", "ok", "a database in the store (MLFLOW_TRACKING_URI is not set)")
