"""What this device reaches at most, measured once, kept in the data folder, and named.

Bandwidth: the better of a matrix-vector product over a matrix far larger than the caches (the
access of a decode step; bytes read) and a copy of it (bytes read and written). Product bandwidth:
what the model's own one-row products reach on the matrices of GPT-2 XL's layers, in the dtype.
Matrix rate: a square matrix product in the dtype. The best of several runs is taken: a ceiling is
what the device can do, and whatever else goes on only takes from it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from kvlab.benchmark.processor import processor_name
from kvlab.benchmark.timing import Clock
from kvlab.data.folder import data_folder
from kvlab.errors import StoreError
from kvlab.files import read_json, write_json
from kvlab.layout.roofline import Ceilings
from kvlab.model.linear import linear

SECONDS = 2.0
"""How long each ceiling is looked for: on a busy machine some runs are disturbed."""

_MOST_RUNS = 200
_COLUMNS = 4096
_BYTES = {"cpu": 2**28, "cuda": 2**31}
LAYER = ((4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400))
"""The matrices of a layer of GPT-2 XL; so many layers in turn that no cache holds them."""

_SIDE = {"cpu": 1536, "cuda": 8192}


def ceilings(device: torch.device, dtype: str, *, again: bool = False) -> Ceilings:
    """This device's ceilings for matrices of ``dtype``; ``again`` measures them anew.

    Raises:
        StoreError: the data folder cannot be written.
    """
    name = device_name(device)
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    path = _path(name, dtype, threads)
    if not again:
        try:
            return Ceilings(**read_json(path))
        except (FileNotFoundError, StoreError, TypeError):
            pass  # not measured yet, or damaged: measured now
    found = Ceilings(
        name,
        dtype,
        threads,
        bandwidth(device),
        matrix_rate(device, dtype),
        product_bandwidth(device, dtype),
    )
    write_json(path, asdict(found))
    return found


def better_ceilings(old: Ceilings, device: torch.device) -> Ceilings:
    """Measures again and keeps the higher of each: for when a model was faster than ``old``."""
    found = Ceilings(
        old.device,
        old.dtype,
        old.threads,
        max(old.bandwidth, bandwidth(device)),
        max(old.flops, matrix_rate(device, old.dtype)),
        max(old.product_bandwidth or 0.0, product_bandwidth(device, old.dtype)),
    )
    write_json(_path(old.device, old.dtype, old.threads), asdict(found))
    return found


def device_name(device: torch.device) -> str:
    """The device's model, as its maker calls it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return processor_name()


def _path(name: str, dtype: str, threads: int) -> Path:
    key = json.dumps([name, dtype, threads, torch.__version__, LAYER])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return data_folder() / "ceilings" / f"{digest}.json"


@torch.inference_mode()
def bandwidth(device: torch.device) -> float:
    """Bytes each second from the device's memory, at best."""
    rows = _BYTES[device.type] // _COLUMNS // 4
    matrix = torch.rand(rows, _COLUMNS, device=device)
    vector, out = torch.rand(_COLUMNS, device=device), torch.empty(rows, device=device)
    product = matrix.nbytes / _best(device, lambda: torch.mv(matrix, vector, out=out))
    target = torch.empty_like(matrix)
    copy = 2 * matrix.nbytes / _best(device, lambda: target.copy_(matrix))
    return max(product, copy)


@torch.inference_mode()
def product_bandwidth(device: torch.device, dtype: str) -> float:
    """Bytes each second that one-row products read of a large model's weights, at best."""
    kind = getattr(torch, dtype)
    layer = sum(rows * columns for rows, columns in LAYER) * kind.itemsize
    shapes = LAYER * max(1, _BYTES[device.type] // layer)
    weights = [torch.rand(shape, device=device).to(kind) for shape in shapes]
    rows = {n: torch.rand(1, 1, n, device=device).to(kind) for _, n in LAYER}
    size = sum(weight.nbytes for weight in weights)
    return size / _best(device, lambda: [linear(rows[w.shape[1]], w, None) for w in weights])


@torch.inference_mode()
def matrix_rate(device: torch.device, dtype: str) -> float:
    """FLOPs each second of a matrix product, at best. A multiply-add is two FLOPs."""
    side = _SIDE[device.type]
    matrix = torch.rand(side, side, device=device).to(getattr(torch, dtype))
    return 2 * side**3 / _best(device, lambda: matrix @ matrix)


def _best(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest of all runs in `SECONDS`, after one that warms up."""
    work()
    found: list[float] = []
    while not found or (sum(found) < SECONDS and len(found) < _MOST_RUNS):
        clock = Clock(device)
        clock.mark()
        work()
        clock.mark()
        found += clock.intervals()
    return min(found)
