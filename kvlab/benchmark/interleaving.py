"""Time variants in turns until their times are known precisely, and watch for other load.

Running all of A and then all of B would measure the state of the machine as much as the
variants. Here every round runs each of them once, in an order that is reversed from round to
round (A B, B A, ...), so that neither a drift nor the position in the round favours one.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import pynvml  # type: ignore[import-untyped]

from kvlab.benchmark.measurement import StopRule
from kvlab.benchmark.timing_statistics import TimingSamples, compare_timings
from kvlab.model.attention_backends import record_kernels

Work = Callable[[], Mapping[str, list[float]]]
"""One turn of a variant. Returns the seconds of each of its series, equally many every turn."""

Samples = dict[tuple[str, str], TimingSamples]
"""By variant and series."""

CHECK_GROWTH = 1.1
"""The stop rule is checked again after this many times the rounds of the last check: intervals
take time to compute, and a rule that is rarely checked rarely stops by chance."""

MAX_FOREIGN_SHARE = 0.1
"""Share of all cores that other processes may use before a measurement is marked noisy."""


class NoiseWatch:
    """Counts processor time and GPU users from its creation on.

    Args:
        nvml: NVML's handle of the GPU that is measured; None on CPU, or without NVML.
        needed_cores: work on a GPU is not disturbed as long as so many cores are free. None: work
            on CPU, which shares memory and caches with all that runs.
    """

    def __init__(self, nvml: Any = None, needed_cores: int | None = None) -> None:
        self._process, self._nvml = psutil.Process(), nvml
        self._needed_cores = needed_cores
        self._start = self._read_times()
        self._gpu_start = max((use.timeStamp for use in read_utilization(nvml)), default=0)

    def read_noise(self) -> str:
        """Return what other processes have used since the start; empty if it disturbs nothing."""
        elapsed, busy, own = (
            now - then for now, then in zip(self._read_times(), self._start, strict=True)
        )
        cores = psutil.cpu_count() or 1
        capacity = elapsed * cores
        share = (busy - own) / capacity if capacity > 0 else 0.0
        spare = 0.0 if self._needed_cores is None else 1 - self._needed_cores / cores
        notes = []
        if share > max(MAX_FOREIGN_SHARE, spare):
            notes.append(f"other processes used {min(1.0, share):.0%} of this machine's cores")
        uses = read_utilization(self._nvml, self._gpu_start)
        pids = {use.pid for use in uses if use.smUtil / 100 > MAX_FOREIGN_SHARE}
        if len(pids) > 1:  # one is this process, which in a container has another id
            who = "another process" if len(pids) == 2 else f"{len(pids) - 1} other processes"
            notes.append(f"{who} computed on this GPU")
        return "; ".join(notes)

    def _read_times(self) -> tuple[float, float, float]:
        """Return wall time, busy time of all cores and processor time of this process."""
        total, own = psutil.cpu_times(), self._process.cpu_times()
        busy = total.user + total.system + getattr(total, "nice", 0.0)
        busy += getattr(total, "steal", 0.0)
        return time.monotonic(), busy, own.user + own.system


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


def read_utilization(handle: Any, since: int = 0) -> Any:
    """Return NVML's samples of the processes that used a device after one of its time stamps.

    The driver samples about six times per second. There are none without a device, if nothing
    ran, or if the driver does not report processes.
    """
    try:
        return pynvml.nvmlDeviceGetProcessUtilization(handle, since) if handle else ()
    except pynvml.NVMLError:
        return ()


@dataclass(frozen=True)
class InterleavedTimings:
    """Samples by variant and series, and what else is known of them."""

    samples: Samples
    noise: str
    """What disturbed them, see `NoiseWatch.read_noise`."""

    kernels: dict[str, str]
    """Variant -> the attention kernels that ran in a turn that is not timed."""

    preparations: dict[str, float] = field(default_factory=dict)
    """Variant -> seconds that preparing the decode step took, where one was timed."""

    slots: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Variant -> fields of a measurement: what the decode step reads."""


def run_interleaved(
    works: Mapping[str, Work],
    rule: StopRule,
    on_turn: Callable[[], None] = lambda: None,
    compared: Collection[str] | None = None,
    make_watch: Callable[[], NoiseWatch] = NoiseWatch,
) -> InterleavedTimings:
    """Run every work once to warm up, then all of them in turns until ``rule`` is met.

    Args:
        works: variant -> one turn of it. The first variant is the one compared with.
        rule: when to stop.
        on_turn: called after every turn. An exception that it raises ends the measurement.
        compared: the series whose comparisons must be settled. None: all.
        make_watch: makes what watches for other load, once the works are warm.
    """
    kernels = {}
    for variant, work in works.items():
        with record_kernels() as ran:
            work()
        kernels[variant] = "; ".join(sorted(ran))
        on_turn()
    rounds: dict[tuple[str, str], list[list[float]]] = {}
    watch, start = make_watch(), time.monotonic()
    count, next_check = 0, rule.min_rounds
    while count < rule.max_rounds:
        for variant in list(works)[:: -1 if count % 2 else 1]:
            for series, seconds in works[variant]().items():
                rounds.setdefault((variant, series), []).append(list(seconds))
            on_turn()
        count += 1
        if count >= rule.min_rounds and time.monotonic() - start > rule.seconds:
            break
        if count >= next_check:
            next_check = math.ceil(count * CHECK_GROWTH)
            samples = _make_samples(rounds)
            if _are_settled(samples, next(iter(works)), compared) and all(
                one.relative_error <= rule.relative_error for one in samples.values()
            ):
                break
    return InterleavedTimings(_make_samples(rounds), watch.read_noise(), kernels)


def _make_samples(rounds: Mapping[tuple[str, str], list[list[float]]]) -> Samples:
    return {key: TimingSamples(np.array(times)) for key, times in rounds.items()}


def _are_settled(samples: Samples, base: str, compared: Collection[str] | None) -> bool:
    """Return whether each variant is known to differ, or not to differ, from ``base``."""
    for (variant, series), times in samples.items():
        if variant != base and (compared is None or series in compared):
            comparison = compare_timings(times, samples[base, series])
            if comparison is None or not comparison.is_settled:
                return False
    return True
