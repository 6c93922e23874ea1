"""The energy that NVIDIA's management library counts; nothing to install for it."""

import ctypes
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


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
