"""What a cluster offers, and how much of that our trials have. Machines come and go meanwhile."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence

from kvlab.errors import ResourceError
from kvlab.spec import ResourcesConfig

REFRESH_SECONDS = 10.0
"""Asking takes a millisecond; a machine that joins is worth minutes."""

_TOLERANCE = 1e-6  # of sums of fractions

ListMachines = Callable[[], Sequence[dict[str, float]]]
"""What each living machine of a cluster offers: ``CPU``, ``GPU`` and more."""


class Capacity:
    """Room in a cluster.

    Args:
        machines: asks the cluster.
        clock: in seconds.

    Attributes:
        cpus, gpus: of all machines together, when they were last asked for.
    """

    def __init__(self, machines: ListMachines, clock: Callable[[], float] = time.monotonic):
        self._machines, self._clock = machines, clock
        self._taken = [0.0, 0.0]
        self.cpus = self.gpus = 0.0
        self.refresh()

    def refresh(self) -> None:
        """Asks the cluster. If it does not answer, or has no machine at all, what was known stays:
        then it is cut off, which starting a trial finds out and mends."""
        self._asked = self._clock()
        with contextlib.suppress(Exception):  # of many kinds, all of them Ray's
            if machines := self._machines():
                self.cpus = sum(machine.get("CPU", 0.0) for machine in machines)
                self.gpus = sum(machine.get("GPU", 0.0) for machine in machines)

    def has_room(self, resources: ResourcesConfig) -> bool:
        """By one sum over the cluster: what does not fit one machine yet waits in Ray's queue."""
        if self._clock() - self._asked >= REFRESH_SECONDS:
            self.refresh()
        cpus, gpus = self._taken
        fits_cpus = cpus + resources.cpus <= self.cpus + _TOLERANCE
        return fits_cpus and gpus + resources.devices <= self.gpus + _TOLERANCE

    def take(self, resources: ResourcesConfig) -> None:
        self._change(resources, 1)

    def give_back(self, resources: ResourcesConfig) -> None:
        self._change(resources, -1)

    def check(self, requests: Iterable[ResourcesConfig]) -> None:
        """Raises ResourceError if a request fits no single machine, whatever all offer."""
        machines = self._machines()
        for request in requests:
            wanted = {"CPU": request.cpus, "GPU": request.devices}
            if any(_fits(machine, wanted) for machine in machines):
                continue
            names = {"CPU": "cpus", "GPU": "gpus"}
            for key, number in wanted.items():
                most = max((machine.get(key, 0.0) for machine in machines), default=0.0)
                if number > most + _TOLERANCE:
                    text = f"resources.{names[key]} = {number:g}, and no machine here has more than"
                    raise ResourceError(f"{text} {most:g}; lower it or use a larger cluster")
            asked = f"resources.cpus = {request.cpus:g} with gpus = {request.devices:g}"
            found = "; ".join(sorted({_describe_machine(machine) for machine in machines}))
            text = f"{asked}, and no single machine here has both ({found})"
            raise ResourceError(f"{text}; lower one of them or use a larger machine")

    def _change(self, resources: ResourcesConfig, sign: int) -> None:
        self._taken[0] += sign * resources.cpus
        self._taken[1] += sign * resources.devices


def _fits(machine: dict[str, float], wanted: dict[str, float]) -> bool:
    return all(machine.get(key, 0.0) + _TOLERANCE >= number for key, number in wanted.items())


def _describe_machine(machine: dict[str, float]) -> str:
    return f"{machine.get('CPU', 0.0):g} CPUs and {machine.get('GPU', 0.0):g} GPUs"


# What this machine has.


def cpu_count() -> int:
    """Cores that this process may use: fewer than the machine's in a container or under taskset."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(allowed or 1, _cgroup_cpu_limit())


def _cgroup_cpu_limit() -> int:
    """The whole cores of a cgroup v2 quota; very many if there is none."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return 1_000_000
