"""The processor's name. Imports no torch."""

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from kvlab.benchmark.decode_timing import DeviceClock
from kvlab.data.data_dir import get_data_dir
from kvlab.errors import StoreError
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.layout.roofline_model import DevicePeaks
from kvlab.model.kernels import linear


def processor_name() -> str:
    """The processor's model, as its maker calls it, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.machine()


# What this device reaches at most, measured once, kept in the data folder, and named.
#
# Bandwidth: the better of a matrix-vector product over a matrix far larger than the caches (the
# access of a decode step; bytes read) and a copy of it (bytes read and written). Product bandwidth:
# what the model's own one-row products reach on the matrices of GPT-2 XL's layers, in the dtype.
# Matrix rate: a square matrix product in the dtype. The best of several runs is taken: a ceiling is
# what the device can do, and whatever else goes on only takes from it.


SECONDS_PER_PEAK = 2.0
"""How long each ceiling is looked for: on a busy machine some runs are disturbed."""

_MAX_RUNS = 200
_COLUMNS = 4096
_BUFFER_BYTES = {"cpu": 2**28, "cuda": 2**31}
GPT2_XL_LAYER = ((4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400))
"""The matrices of a layer of GPT-2 XL; so many layers in turn that no cache holds them."""

_MATRIX_SIDE = {"cpu": 1536, "cuda": 8192}


def load_device_peaks(device: torch.device, dtype: str, *, again: bool = False) -> DevicePeaks:
    """This device's ceilings for matrices of ``dtype``; ``again`` measures them anew.

    Raises:
        StoreError: the data folder cannot be written.
    """
    name = device_name(device)
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    path = _peaks_path(name, dtype, threads)
    if not again:
        try:
            return DevicePeaks(**read_json(path))
        except (FileNotFoundError, StoreError, TypeError):
            pass  # not measured yet, or damaged: measured now
    found = DevicePeaks(
        name,
        dtype,
        threads,
        measure_bandwidth(device),
        measure_matrix_rate(device, dtype),
        measure_product_bandwidth(device, dtype),
    )
    write_json(path, asdict(found))
    return found


def remeasure_device_peaks(old: DevicePeaks, device: torch.device) -> DevicePeaks:
    """Measures again and keeps the higher of each: for when a model was faster than ``old``."""
    found = DevicePeaks(
        old.device,
        old.dtype,
        old.threads,
        max(old.bandwidth, measure_bandwidth(device)),
        max(old.flops, measure_matrix_rate(device, old.dtype)),
        max(old.product_bandwidth or 0.0, measure_product_bandwidth(device, old.dtype)),
    )
    write_json(_peaks_path(old.device, old.dtype, old.threads), asdict(found))
    return found


def device_name(device: torch.device) -> str:
    """The device's model, as its maker calls it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return processor_name()


def _peaks_path(name: str, dtype: str, threads: int) -> Path:
    key = json.dumps([name, dtype, threads, torch.__version__, GPT2_XL_LAYER])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return get_data_dir() / "ceilings" / f"{digest}.json"


@torch.inference_mode()
def measure_bandwidth(device: torch.device) -> float:
    """Bytes each second from the device's memory, at best."""
    rows = _BUFFER_BYTES[device.type] // _COLUMNS // 4
    matrix = torch.rand(rows, _COLUMNS, device=device)
    vector, out = torch.rand(_COLUMNS, device=device), torch.empty(rows, device=device)
    product = matrix.nbytes / _fastest_seconds(device, lambda: torch.mv(matrix, vector, out=out))
    target = torch.empty_like(matrix)
    copy = 2 * matrix.nbytes / _fastest_seconds(device, lambda: target.copy_(matrix))
    return max(product, copy)


@torch.inference_mode()
def measure_product_bandwidth(device: torch.device, dtype: str) -> float:
    """Bytes each second that one-row products read of a large model's weights, at best."""
    kind = getattr(torch, dtype)
    layer = sum(rows * columns for rows, columns in GPT2_XL_LAYER) * kind.itemsize
    shapes = GPT2_XL_LAYER * max(1, _BUFFER_BYTES[device.type] // layer)
    weights = [torch.rand(shape, device=device).to(kind) for shape in shapes]
    rows = {n: torch.rand(1, 1, n, device=device).to(kind) for _, n in GPT2_XL_LAYER}
    size = sum(weight.nbytes for weight in weights)
    return size / _fastest_seconds(
        device, lambda: [linear(rows[w.shape[1]], w, None) for w in weights]
    )


@torch.inference_mode()
def measure_matrix_rate(device: torch.device, dtype: str) -> float:
    """FLOPs each second of a matrix product, at best. A multiply-add is two FLOPs."""
    side = _MATRIX_SIDE[device.type]
    matrix = torch.rand(side, side, device=device).to(getattr(torch, dtype))
    return 2 * side**3 / _fastest_seconds(device, lambda: matrix @ matrix)


def _fastest_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest of all runs in `SECONDS`, after one that warms up."""
    work()
    found: list[float] = []
    while not found or (sum(found) < SECONDS_PER_PEAK and len(found) < _MAX_RUNS):
        clock = DeviceClock(device)
        clock.mark()
        work()
        clock.mark()
        found += clock.intervals()
    return min(found)
