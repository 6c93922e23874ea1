"""How many trials share a GPU, from the memory that one of them was measured to take.

The allocator's peak is not everything: every process also holds a CUDA context and the workspace
of libraries, which no allocator counts and no fraction limits.

Kernels of several processes run at the same time only under NVIDIA's Multi-Process Service (MPS).
Without it the processes take turns.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvlab.errors import ResourceError
from kvlab.humanize import format_bytes

CONTEXT_BYTES = 768 * 2**20
"""Bytes of one process outside the allocator. CUDA's context and cuBLAS take 0.3 to 0.6 GB."""

PEAK_MARGIN = 1.1
"""Factor on the measured peak: later steps may fragment the allocator's memory more."""

MAX_TRIALS_PER_DEVICE = 16
"""With more, the steps of one trial wait for those of the others."""


def trials_per_device(peak_bytes: int, device_bytes: int) -> int:
    """Return how many trials of ``peak_bytes`` each run side by side in ``device_bytes``."""
    each = peak_bytes * PEAK_MARGIN + CONTEXT_BYTES
    return max(1, min(MAX_TRIALS_PER_DEVICE, int(device_bytes / each)))


MPS_CONTROL = "nvidia-cuda-mps-control"
"""The program that starts the service's daemon. It comes with the driver."""

MPS_START_SECONDS = 20.0

MPS_PROBE = """
import ctypes
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
codes = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0),
         cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)]
raise SystemExit(int(any(codes)))
"""
"""A process that uses CUDA. In some containers the daemon starts and serves nobody: then every
process that uses CUDA would fail, so it is ended again."""


def is_mps_running() -> bool:
    """Return whether MPS serves the processes of this machine."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return (folder / "control").exists()


def start_mps() -> bool:
    """Start MPS unless it runs; return whether it does.

    To be called before a process uses CUDA. The daemon stays: ``echo quit |
    nvidia-cuda-mps-control`` ends it.
    """
    import fcntl

    program, path = shutil.which(MPS_CONTROL), _outcome_path()
    if program is None:
        return is_mps_running()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a") as outcome:
        fcntl.flock(outcome, fcntl.LOCK_EX)  # others wait until it is known whether it serves
        if is_mps_running():
            return True
        is_started = _run([program, "-d"]) and is_mps_running()
        serves = is_started and _run([sys.executable, "-c", MPS_PROBE])
        outcome.truncate(0)
        if not serves:
            outcome.write(_SERVES_NOBODY)
            stop_mps()
    return serves


def stop_mps() -> None:
    """End MPS, whoever started it. A process that uses it should have ended before."""
    program = shutil.which(MPS_CONTROL)
    if program is not None and is_mps_running():
        _run([program], "quit\n")


_SERVES_NOBODY = "serves nobody\n"


def _outcome_path() -> Path:
    """Return the file that says how the last start ended, and is locked meanwhile."""
    return Path(tempfile.gettempdir(), f"kvlab-devices-{os.getuid()}", "mps")


def _run(command: list[str], text: str = "") -> bool:
    """Run a command; return whether it succeeded in time.

    The daemon serves the devices that it sees, under new numbers. With one trial's
    ``CUDA_VISIBLE_DEVICES`` it would serve no trial on another device.
    """
    seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(
            command, input=text.encode(), capture_output=True, check=False, env=seen,
            timeout=MPS_START_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def describe_sharing() -> str:
    """Return how trials share a GPU of this machine, a clause."""
    turns, path = "trials on one GPU take turns", _outcome_path()
    if not is_mps_running():
        if shutil.which(MPS_CONTROL) is None:
            return f"{turns}: {MPS_CONTROL} is not here"
        if path.is_file() and path.read_text() == _SERVES_NOBODY:
            return f"{turns}: NVIDIA's MPS was started here and served no process"
    return "trials on one GPU compute at the same time, by NVIDIA's MPS"


def device_share(count: int) -> float:
    """Return the fraction of a device that each of ``count`` trials requests.

    Rounded down to the four digits that Ray counts.
    """
    return 10_000 // count / 10_000


def allocator_share(gpus: float, device_bytes: int) -> float:
    """Return the fraction of a device's memory that a process of ``gpus`` may allocate, without
    its context.

    Raises:
        ResourceError: nothing would be left.
    """
    if gpus >= 1:
        return 1.0
    least = CONTEXT_BYTES / device_bytes
    if gpus <= least:
        text = f"resources.gpus = {gpus:g} of {format_bytes(device_bytes)} is less than a process"
        raise ResourceError(f"{text} takes before it trains; use more than {least:.2g}")
    return gpus - least
