"""Measure the most memory that this process has while something runs.

On CUDA PyTorch's allocator counts. On CPU it is the resident size: Linux keeps its peak for
every process and lets the process reset it, so short peaks are seen and no second process is
needed. Memory that the C library keeps after it was freed is returned to the system first;
otherwise it would be reused without being counted. The work runs in a thread of its own, whose
freed buffers return to the system at once: in the heap of a long-lived thread their gaps would
count, tens of MiB for GPT-2.
"""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import torch

from kvlab.model.generate import capture_stream, release_workspaces
from kvlab.model.kernels import malloc

SAMPLE_SECONDS = 0.001

_YOUNG_GENERATION = 1
"""Python's generation of objects made since its last full collection: what earlier work may have
left. Collecting all generations takes a tenth of a second and more once torch is loaded."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use before the work and at its peak."""

    before: int
    peak: int

    @property
    def growth(self) -> int:
        return max(0, self.peak - self.before)


def measure_peak_memory(
    device: torch.device, work: Callable[[], object], *, reserved: bool = False
) -> MemoryUse:
    """Run ``work`` once on ``device`` and return the memory that it needed at most.

    Args:
        work: on CPU it is called in another thread, so settings of this thread, such as
            `torch.inference_mode`, do not apply to it.
        reserved: on CUDA count what the allocator reserved of the device, not what tensors use,
            and give unused blocks back before and after. It includes the workspaces of cuBLAS.
    """
    if device.type != "cuda":
        with malloc.return_freed_memory(), ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(_measure_resident, work).result()
    release_workspaces()
    if reserved:
        torch.cuda.empty_cache()
    else:
        _use_workspaces(device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    current = torch.cuda.memory_reserved if reserved else torch.cuda.memory_allocated
    peak = torch.cuda.max_memory_reserved if reserved else torch.cuda.max_memory_allocated
    before = current(device)
    try:
        work()
        torch.cuda.synchronize(device)
        return MemoryUse(before, peak(device))
    finally:
        if reserved:
            torch.cuda.empty_cache()


def _use_workspaces(device: torch.device) -> None:
    """Let cuBLAS allocate its workspaces (32 MiB a stream on a large GPU) before the work does.

    PyTorch may release those of a stream together with a graph that was captured on it.
    """
    one = torch.ones(16, 16, device=device)
    for stream in (torch.cuda.current_stream(device), capture_stream(device)):
        with torch.cuda.stream(stream):
            one @ one


def _measure_resident(work: Callable[[], object]) -> MemoryUse:
    gc.collect(_YOUNG_GENERATION)
    malloc.return_free_memory()
    if not malloc.reset_resident_peak():
        return _sample_resident(work)
    before = malloc.read_status_bytes("VmRSS")
    work()
    return MemoryUse(before, malloc.read_status_bytes("VmHWM"))


def _sample_resident(work: Callable[[], object]) -> MemoryUse:
    """Sample the resident size in a second thread; peaks below a millisecond may be missed."""
    process, is_done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(SAMPLE_SECONDS):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        is_done.set()
        watcher.join()
    return MemoryUse(before, max(peak, process.memory_info().rss))
