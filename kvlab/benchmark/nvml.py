"""Processes of one NVIDIA GPU, by NVML."""

from typing import Any, NamedTuple

import pynvml  # type: ignore[import-untyped]


class GpuUtilization(NamedTuple):
    """Share of a GPU's cores that one process used.

    Attributes:
        pid: the process.
        time: NVML's time stamp in microseconds.
        share: from 0 to 1.
    """

    pid: int
    time: int
    share: float


def open_device(uuid: str) -> Any:
    """Return NVML's handle of the device ``uuid`` (``GPU-...``).

    Returns:
        The handle, or None if the driver is not installed or has no such device.
    """
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None


def read_utilization(handle: Any, since: int = 0) -> list[GpuUtilization]:
    """Return the processes that used a device's cores after a time stamp of NVML.

    The driver samples about six times per second. The list is empty without a device, if nothing
    ran, or if the driver does not report processes.
    """
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since) if handle else []
    except pynvml.NVMLError:
        return []
    return [GpuUtilization(s.pid, s.timeStamp, s.smUtil / 100) for s in samples]
