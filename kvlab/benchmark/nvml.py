"""What NVIDIA's management library knows: energy, and who uses a GPU. Nothing to install."""

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


class _Use(ctypes.Structure):
    """``nvmlProcessUtilizationSample_t``: a process's share of the GPU, in hundredths."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("moment", ctypes.c_ulonglong),
        ("sm", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
    )


@dataclass(frozen=True)
class GpuUtilization:
    """``moment`` is the library's, in microseconds."""

    pid: int
    moment: int
    share: float


class Nvml:
    """The library, initialised, and one device by its PCI address or UUID."""

    def __init__(self, library: Any, handle: ctypes.c_void_p):
        self._library, self._handle = library, handle

    @classmethod
    def open(cls, uuid: str, name: str = LIBRARY) -> "Nvml | None":
        """The device ``uuid`` (``GPU-...``); None where there is no library or no such device."""
        try:
            library = ctypes.CDLL(name)
        except OSError:
            return None
        if library.nvmlInit_v2() != 0:
            return None
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
            return None
        return cls(library, handle)

    def joules(self) -> float | None:
        """Energy since the driver was loaded; None if the device does not count it."""
        millijoules = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEnergyConsumption(
            self._handle, ctypes.byref(millijoules)
        )
        return None if code != 0 else millijoules.value / 1000.0

    def uses(self, since: int = 0) -> list[GpuUtilization]:
        """Which processes used the GPU's cores after a moment of an earlier answer, sampled about
        each sixth of a second; empty where the driver does not tell."""
        query, count = self._library.nvmlDeviceGetProcessUtilization, ctypes.c_uint()
        after = ctypes.c_ulonglong(since)
        query(self._handle, None, ctypes.byref(count), after)  # answers how many there are
        if not count.value:
            return []
        found = (_Use * count.value)()
        if query(self._handle, found, ctypes.byref(count), after) != 0:
            return []
        return [GpuUtilization(use.pid, use.moment, use.sm / 100) for use in found[: count.value]]
