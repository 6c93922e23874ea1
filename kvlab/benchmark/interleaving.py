"""Whether a machine was busy with something else while it was measured."""

import math
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import psutil

from kvlab.benchmark.measurement import StopRule
from kvlab.benchmark.nvml import GpuUtilization, Nvml
from kvlab.benchmark.timing_statistics import TimingSamples, compare_timings

MAX_FOREIGN_SHARE = 0.1
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
        if self.others > MAX_FOREIGN_SHARE:
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

    def _uses(self, since: int = 0) -> list[GpuUtilization]:
        return self._nvml.uses(since) if self._nvml is not None else []

    def _others_on_gpu(self) -> int:
        """Processes but this one. In a container this one may go by another number there: it is
        then taken for one of those that are busy, as it was."""
        pids = {use.pid for use in self._uses(self._moment) if use.share > MAX_FOREIGN_SHARE}
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


# Variants measured in turns, until their times are known well enough.
#
# All A and then all B would measure the machine's mood as much as the variants. Here every round
# runs each of them once, in an order that turns around from round to round (A B, B A, ...), so
# that neither a drift nor the place in the round favours one.


Key = TypeVar("Key", bound=Hashable)

Work = Callable[[], Mapping[str, list[float]]]
"""One turn of a variant: seconds of each of its series, as many in every turn."""


CHECK_GROWTH = 1.1
"""Intervals are looked at when there are this many times the rounds of the last look: they take
time to compute, and a rule that looks rarely is rarely fooled by chance."""


@dataclass(frozen=True)
class InterleavedTimings(Generic[Key]):
    """What interleaved turns gave: samples by variant and series, and how quiet it was."""

    samples: dict[tuple[Key, str], TimingSamples]
    noise: Noise

    @property
    def rounds(self) -> int:
        """Of every series."""
        return len(next(iter(self.samples.values())).rounds)


Rounds = dict[tuple[Key, str], list[list[float]]]


def run_interleaved(
    works: Mapping[Key, Work],
    rule: StopRule,
    tick: Callable[[], None] = lambda: None,
    compared: Collection[str] | None = None,
    nvml: Nvml | None = None,
) -> InterleavedTimings[Key]:
    """Runs every work once to warm up, then all of them in turns.

    Args:
        works: variant -> one turn of it. The others are compared with the first.
        tick: called after every turn; what it raises ends the measurement.
        compared: the series whose comparisons must be settled; None: all.
        nvml: the GPU on which it runs, to see whether others use it.
    """
    for work in works.values():
        work()
        tick()
    rounds: Rounds[Key] = {}
    watch, began = NoiseWatch(nvml), time.monotonic()
    count, look = 0, rule.least
    while count < rule.most:
        order = list(works)[:: -1 if count % 2 else 1]
        for variant in order:
            for series, seconds in works[variant]().items():
                rounds.setdefault((variant, series), []).append(list(seconds))
            tick()
        count += 1
        if count < rule.least:
            continue
        if time.monotonic() - began > rule.seconds:
            break
        if count >= look:
            look = math.ceil(count * CHECK_GROWTH)
            if _comparisons_settled(rounds, list(works), compared) and _medians_precise(
                rounds, rule.relative_error
            ):
                break
    samples = {key: TimingSamples.of(found) for key, found in rounds.items()}
    return InterleavedTimings(samples, watch.noise())


def _comparisons_settled(
    rounds: Rounds[Key], works: list[Key], compared: Collection[str] | None
) -> bool:
    """Whether each variant is known to differ, or not to, from the first."""
    base = works[0]
    for (variant, series), found in rounds.items():
        if variant != base and (compared is None or series in compared):
            comparison = compare_timings(
                TimingSamples.of(found), TimingSamples.of(rounds[base, series])
            )
            if comparison is None or not comparison.settled:
                return False
    return True


def _medians_precise(rounds: Rounds[Key], wanted: float) -> bool:
    return all(TimingSamples.of(found).relative_error <= wanted for found in rounds.values())
