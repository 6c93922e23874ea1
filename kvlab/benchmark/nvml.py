"""Processes of one NVIDIA GPU, by NVML."""

from dataclasses import dataclass
from typing import Any

import pynvml  # type: ignore[import-untyped]


@dataclass(frozen=True)
class GpuUtilization:
    """Share of a GPU's cores that one process used.

    Attributes:
        pid: the process.
        time: NVML's time stamp in microseconds.
        share: from 0 to 1.
    """

    pid: int
    time: int
    share: float


class Nvml:
    """One device as NVML sees it.

    Args:
        handle: the device's handle, which `open` looks up.
    """

    def __init__(self, handle: Any):
        self._handle = handle

    @classmethod
    def open(cls, uuid: str) -> "Nvml | None":
        """Open the device ``uuid`` (``GPU-...``).

        Returns:
            The device, or None if the driver is not installed or has no such device.
        """
        try:
            pynvml.nvmlInit()
            return cls(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        except pynvml.NVMLError:
            return None

    def read_utilization(self, since: int = 0) -> list[GpuUtilization]:
        """Return the processes that used the GPU's cores after a time stamp of NVML.

        The driver samples about six times per second. The list is empty if nothing ran, or if
        the driver does not report processes.
        """
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._handle, since)
        except pynvml.NVMLError:
            return []
        return [GpuUtilization(s.pid, s.timeStamp, s.smUtil / 100) for s in samples]
