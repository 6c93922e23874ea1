"""Time on a device that may run behind the program."""

import time

import torch


class Clock:
    """Marks moments of a device's work.

    On CUDA a mark is an event in the stream: the device is not made to wait, and what is
    measured is its own time, with the gaps in which it had nothing to do.
    """

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._moments: list[float] = []

    def mark(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._moments.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Seconds between one mark and the next; waits for the device."""
        if self._is_cuda:
            self._events[-1].synchronize()
            pairs = zip(self._events[:-1], self._events[1:], strict=True)
            return [first.elapsed_time(second) / 1000.0 for first, second in pairs]
        pairs_of_moments = zip(self._moments[:-1], self._moments[1:], strict=True)
        return [second - first for first, second in pairs_of_moments]
