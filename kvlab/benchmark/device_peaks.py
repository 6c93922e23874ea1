"""Peak rates of this device: measured once, kept in the data folder, and named in results.

They are measured by work of their own, and no decode step changes them: ceilings that are raised
when a step is faster would follow the steps that they predict.

- Bandwidth: the better of a matrix-vector product over a matrix far larger than the caches (the
  access pattern of a decode step; bytes read) and a copy of it (bytes read and written).
- Product bandwidth: what the model's own one-row products reach on the matrices of GPT-2 XL's
  layers in the given dtype. On CUDA in a graph, as in a decode step: launches one by one would
  halve it.
- Matrix rate: a square matrix product in the given dtype.

The best of several runs counts: a peak is what the device can do, and any other load only
reduces it.
"""

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from kvlab.benchmark.decode_timing import DeviceClock
from kvlab.benchmark.interleaving import NoiseWatch
from kvlab.data.data_dir import get_data_dir
from kvlab.errors import StoreError
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.layout.roofline_model import DevicePeaks
from kvlab.model.generate import capture_graph
from kvlab.model.kernels.linear import linear

SECONDS_PER_PEAK = 2.0
"""Duration of the runs for each peak. On a busy machine some of them are disturbed."""

GPT2_XL_LAYER = ((4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400))
"""Shapes of the matrices of one layer. Enough layers are read in turn that no cache holds them."""

_MAX_RUNS = 200
_COLUMNS = 4096
GPU_CORES = 2
"""Cores that a process busy with a GPU uses: one launches, one serves the driver and autograd."""

BUFFER_BYTES = {"cpu": 2**28, "cuda": 2**31}
MATRIX_SIDE = {"cpu": 1536, "cuda": 8192}


@torch.inference_mode()
def load_device_peaks(
    device: torch.device, dtype: str, *, remeasure: bool = False, nvml: Any = None
) -> DevicePeaks:
    """Return this device's peaks for matrices of ``dtype``, measuring them if necessary.

    Peaks that were measured while other processes used the device are returned with that note and
    not kept: the next call measures again.

    Args:
        remeasure: ignore peaks that were kept.
        nvml: NVML's handle of the GPU in use, to detect other processes on it.

    Raises:
        StoreError: the data folder cannot be written.
    """
    name = device_name(device)
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    facts = [name, dtype, threads, torch.__version__, GPT2_XL_LAYER, SECONDS_PER_PEAK]
    key = json.dumps([*facts, "graph"] if threads == 0 else facts)  # threads are of the CPU
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = get_data_dir() / "ceilings" / f"{digest}.json"
    if not remeasure:
        try:
            return DevicePeaks(**read_json(path))
        except (FileNotFoundError, StoreError, TypeError):
            pass  # not measured yet, or the file is damaged
    watch = NoiseWatch(nvml, needed_cores(device))
    peaks = DevicePeaks(
        name,
        dtype,
        threads,
        measure_bandwidth(device),
        measure_matrix_rate(device, dtype),
        measure_product_bandwidth(device, dtype),
        watch.read_noise(),
    )
    if not peaks.disturbance:
        write_json(path, asdict(peaks))
    return peaks


def needed_cores(device: torch.device) -> int | None:
    """Return the cores that work on a GPU needs free beside it; None for work on CPU."""
    return min(GPU_CORES, torch.get_num_threads()) if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """Return the maker's name of the device."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return processor_name()


def processor_name() -> str:
    """Return the maker's name of the processor, or its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    name = ""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return name or platform.machine()


def measure_bandwidth(device: torch.device) -> float:
    """Return the peak memory bandwidth in bytes per second."""
    rows = BUFFER_BYTES[device.type] // _COLUMNS // 4
    matrix = torch.rand(rows, _COLUMNS, device=device)
    vector, out = torch.rand(_COLUMNS, device=device), torch.empty(rows, device=device)
    product = matrix.nbytes / _fastest_seconds(device, lambda: torch.mv(matrix, vector, out=out))
    target = torch.empty_like(matrix)
    copy = 2 * matrix.nbytes / _fastest_seconds(device, lambda: target.copy_(matrix))
    return max(product, copy)


def measure_product_bandwidth(device: torch.device, dtype: str) -> float:
    """Return the peak rate, in bytes per second, at which one-row products read weights."""
    weight_dtype = getattr(torch, dtype)
    layer = sum(rows * columns for rows, columns in GPT2_XL_LAYER) * weight_dtype.itemsize
    shapes = GPT2_XL_LAYER * max(1, BUFFER_BYTES[device.type] // layer)
    weights = [torch.rand(shape, device=device).to(weight_dtype) for shape in shapes]
    rows = {n: torch.rand(1, 1, n, device=device).to(weight_dtype) for _, n in GPT2_XL_LAYER}
    size = sum(weight.nbytes for weight in weights)

    def multiply() -> None:
        for weight in weights:
            linear(rows[weight.shape[1]], weight, None)

    is_cuda = device.type == "cuda"
    work = capture_graph(multiply, device)[0].replay if is_cuda else multiply
    return size / _fastest_seconds(device, work)


def measure_matrix_rate(device: torch.device, dtype: str) -> float:
    """Return the peak FLOPs per second of a matrix product. A multiply-add is two FLOPs."""
    side = MATRIX_SIDE[device.type]
    matrix = torch.rand(side, side, device=device).to(getattr(torch, dtype))
    return 2 * side**3 / _fastest_seconds(device, lambda: matrix @ matrix)


def _fastest_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the fastest of all runs within `SECONDS_PER_PEAK`, after one run to warm up."""
    work()
    seconds: list[float] = []
    while not seconds or (sum(seconds) < SECONDS_PER_PEAK and len(seconds) < _MAX_RUNS):
        clock = DeviceClock(device)
        clock.mark()
        work()
        clock.mark()
        seconds += clock.intervals()
    return min(seconds)
