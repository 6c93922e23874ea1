"""Whether a machine was busy with something else while it was measured."""

import time
from dataclasses import dataclass

import psutil

from kvlab.benchmark.nvml import GpuUse, Nvml

TOLERATED = 0.1
"""Share of all cores that other processes may use before a measurement is called noisy."""


@dataclass(frozen=True)
class Noise:
    """``others``: share of all cores' time that other processes used meanwhile; ``on_gpu``: other
    processes that computed on the GPU."""

    others: float
    on_gpu: int = 0

    @property
    def note(self) -> str:
        """Empty if it was quiet."""
        notes = []
        if self.others > TOLERATED:
            notes.append(f"other processes used {self.others:.0%} of this machine's cores")
        if self.on_gpu:
            who = "another process" if self.on_gpu == 1 else f"{self.on_gpu} other processes"
            notes.append(f"{who} computed on this GPU")
        return "; ".join(notes)


class NoiseWatch:
    """Counts processor time, and who uses the GPU, from its making on.

    Args:
        nvml: the GPU that is measured; None on CPU, or where there is no library.
    """

    def __init__(self, nvml: Nvml | None = None) -> None:
        self._process, self._nvml = psutil.Process(), nvml
        self._began = self._counts()
        self._moment = max((use.moment for use in self._uses()), default=0)

    def _uses(self, since: int = 0) -> list[GpuUse]:
        return self._nvml.uses(since) if self._nvml is not None else []

    def _others_on_gpu(self) -> int:
        """Processes but this one. In a container this one may go by another number there: it is
        then taken for one of those that are busy, as it was."""
        pids = {use.pid for use in self._uses(self._moment) if use.share > TOLERATED}
        mine = {self._process.pid} if self._process.pid in pids else set(list(pids)[:1])
        return len(pids - mine)

    def noise(self) -> Noise:
        """What other processes used since the start: all busy time less this process's."""
        moment, busy, own = (
            now - then for now, then in zip(self._counts(), self._began, strict=True)
        )
        capacity = moment * (psutil.cpu_count() or 1)
        share = (busy - own) / capacity if capacity > 0 else 0.0
        return Noise(min(1.0, max(0.0, share)), self._others_on_gpu())

    def _counts(self) -> tuple[float, float, float]:
        total, own = psutil.cpu_times(), self._process.cpu_times()
        busy = total.user + total.system + getattr(total, "nice", 0.0)
        busy += getattr(total, "steal", 0.0)
        return time.monotonic(), busy, own.user + own.system
