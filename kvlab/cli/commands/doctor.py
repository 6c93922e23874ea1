"""`kvlab doctor`: check what is installed and usable, with a hint for each gap."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvlab.cli.shared_arguments import add_json, add_store
from kvlab.data import get_data_dir, list_prepared_datasets
from kvlab.data.hellaswag_dataset import find_hellaswag_file
from kvlab.errors import StoreError
from kvlab.fs.atomic_files import write_atomic
from kvlab.fs.lock import Lock
from kvlab.humanize import format_bytes
from kvlab.layout.gpu_sharing import can_share, describe_sharing

_MARKS = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    checks = list(run_checks(options.store))
    if options.json:
        print(json.dumps([check.as_dict() for check in checks], indent=1))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{_MARKS[check.state]}  {check.name:<{width}}  {check.finding}")
            if check.hint:
                print(f"{'':<{width + 9}}-> {check.hint}")
    return int(any(check.state == "wrong" for check in checks))


CheckState = Literal["ok", "note", "wrong"]

MIN_FREE_BYTES = 2 * 10**9

MIN_FREE_GPU_SHARE = 0.9
"""With less of a GPU's memory free something else is at work there."""

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
"""Modules of ray[default] without which the dashboard of a Ray head accepts no jobs."""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        finding: What is there, or what is wrong.
        hint: What to do about it; empty if there is nothing to do.
    """

    name: str
    state: CheckState
    finding: str
    hint: str = ""

    def as_dict(self) -> dict[str, str]:
        return {
            "name": self.name, "state": self.state, "found": self.finding, "way_out": self.hint,
        }  # fmt: skip


def run_checks(store: str) -> Iterator[Check]:
    """Run every check. None raises an error, and none leaves files behind."""
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
    if (3, 11) <= sys.version_info < (3, 15):
        return Check("python", "ok", version)
    return Check("python", "wrong", version, "use Python 3.11 to 3.14")


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
        yield _explain_missing_gpu(torch.__version__, torch.version.cuda, _driver_cuda())
        return
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_properties(index).name
        yield _check_gpu_memory(index, name, *torch.cuda.mem_get_info(index))
    yield _check_driver(torch.version.cuda or "", _driver_cuda())
    yield _check_kernel_compiler()
    yield _check_nccl(torch.cuda.device_count())
    yield Check("sharing", "ok" if can_share() else "note", describe_sharing())


def _driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver serves; None without a driver."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    except pynvml.NVMLError:
        return None
    return version // 1000, version % 1000 // 10


def _explain_missing_gpu(
    torch_version: str, torch_cuda: str | None, driver: tuple[int, int] | None
) -> Check:
    if driver is None:
        return Check("GPU", "note", "none visible; experiments with resources.gpus need one")
    served = ".".join(map(str, driver))
    if torch_cuda is None:
        text = f"an NVIDIA driver is here (CUDA {served}), and torch {torch_version} is for CPU"
        return Check("GPU", "wrong", text, f"pip install a torch for CUDA {driver[0]}")
    text = f"torch for CUDA {torch_cuda} sees no GPU, and the driver serves CUDA {served}"
    hint = "update the driver, or pip install a torch for its CUDA; or unset CUDA_VISIBLE_DEVICES"
    return Check("GPU", "wrong", text, hint)


def _check_gpu_memory(index: int, name: str, free: int, total: int) -> Check:
    finding = f"{name}, {format_bytes(free)} of {format_bytes(total)} memory free"
    if free >= MIN_FREE_GPU_SHARE * total:
        return Check(f"GPU {index}", "ok", finding)
    hint = "another process holds the rest: nvidia-smi lists it. Times beside it do not count"
    return Check(f"GPU {index}", "note", finding, hint)


def _check_driver(torch_cuda: str, driver: tuple[int, int] | None) -> Check:
    if driver is None:
        return Check("driver", "note", "NVML does not answer: no other processes seen")
    built = tuple(map(int, torch_cuda.split(".")[:2]))
    finding = f"serves CUDA {'.'.join(map(str, driver))}, and torch is for {torch_cuda}"
    if driver >= built:
        return Check("driver", "ok", finding)
    # within a major version newer programs run on older drivers, without what is new
    hint = f"update the driver, or pip install a torch for CUDA {driver[0]}.{driver[1]}"
    return Check("driver", "note" if driver[0] == built[0] else "wrong", finding, hint)


def _check_kernel_compiler() -> Check:
    """Check what Triton needs for training.compile, windows while training, and our kernels."""
    if importlib.util.find_spec("triton") is None:
        text = (
            "Triton is not installed: no training.compile, and windows, losses and steps are slow"
        )
        return Check("compiler", "wrong", text, "pip install triton")
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), None)
    if compiler is None or shutil.which(compiler) is None:
        text = "no C compiler, which Triton needs for training.compile and for kernels of kvlab"
        return Check("compiler", "wrong", text, "install gcc, or name one with CC")
    return Check("compiler", "ok", f"Triton, with {compiler}")


def _check_nccl(gpus: int) -> Check:
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return Check("NCCL", "ok", version)
    state: CheckState = "wrong" if gpus > 1 else "note"
    return Check("NCCL", state, "not in this torch: no training on several GPUs")


def _check_writable(name: str, folder: Path, setting: str) -> Check:
    """Check that files can be written, locked and renamed in ``folder``, without making it."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    hint = f"choose another with {setting}, or change its permissions"
    if not existing.is_dir():
        return Check(name, "wrong", f"{existing} is a file", hint)
    try:
        with tempfile.TemporaryDirectory(prefix=".kvlab-doctor-", dir=existing) as scratch:
            _try_files(Path(scratch))
    except (OSError, StoreError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return Check(name, "wrong", f"{folder} cannot be used: {reason}", hint)
    free = shutil.disk_usage(existing).free
    finding = f"{folder} is writable, {format_bytes(free)} free"
    if free < MIN_FREE_BYTES:
        return Check(name, "note", finding, "free some space: checkpoints take three times a model")
    return Check(name, "ok", finding)


def _try_files(folder: Path) -> None:
    with Lock(folder / "lock").hold():
        write_atomic(folder / "file", "")


def _check_datasets() -> Check:
    datasets = list_prepared_datasets()
    if datasets:
        return Check("text", "ok", f"{len(datasets)} prepared in {get_data_dir()}")
    hint = "none needed: it is prepared at first use; or now, with `kvlab data prepare EXPERIMENT`"
    return Check("text", "note", "none prepared yet", hint)


def _check_hellaswag() -> Check:
    path = find_hellaswag_file()
    if path is not None:
        return Check("HellaSwag", "ok", f"in {path.parent}")
    hint = "none needed without evaluation.hellaswag; else `kvlab data get hellaswag`"
    return Check("HellaSwag", "note", "not here yet", hint)


def _check_mlflow() -> Check:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        return Check("MLflow", "ok", "a database in the store (MLFLOW_TRACKING_URI is not set)")
    return Check("MLflow", "note", f"MLFLOW_TRACKING_URI = {uri}; `kvlab sync` tries it")


def _check_job_server() -> Check:
    missing = [name for name in JOB_SERVER_MODULES if importlib.util.find_spec(name) is None]
    if not missing:
        return Check("job server", "ok", "a Ray head here takes `submit --detach` from elsewhere")
    hint = "none needed, but on a cluster's head: pip install 'kvlab[cluster]'"
    return Check("job server", "note", f"Ray's needs {', '.join(missing)}", hint)
