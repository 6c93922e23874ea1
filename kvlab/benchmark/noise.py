"""Whether a machine was busy with something else while it was measured."""

import time
from dataclasses import dataclass

import psutil

TOLERATED = 0.1
"""Share of all cores that other processes may use before a measurement is called noisy."""


@dataclass(frozen=True)
class Noise:
    """``others``: share of all cores' time that other processes used meanwhile."""

    others: float

    @property
    def note(self) -> str:
        """Empty if it was quiet."""
        if self.others <= TOLERATED:
            return ""
        return f"other processes used {self.others:.0%} of this machine's cores"


class NoiseWatch:
    """Counts processor time from its making on."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began = self._counts()

    def noise(self) -> Noise:
        """What other processes used since the start: all busy time less this process's."""
        moment, busy, own = (
            now - then for now, then in zip(self._counts(), self._began, strict=True)
        )
        capacity = moment * (psutil.cpu_count() or 1)
        share = (busy - own) / capacity if capacity > 0 else 0.0
        return Noise(min(1.0, max(0.0, share)))

    def _counts(self) -> tuple[float, float, float]:
        total, own = psutil.cpu_times(), self._process.cpu_times()
        busy = total.user + total.system + getattr(total, "nice", 0.0)
        busy += getattr(total, "steal", 0.0)
        return time.monotonic(), busy, own.user + own.system
