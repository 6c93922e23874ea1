"""The resources of a cluster and of this machine, and how much of them kvlab's tasks have."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvlab.errors import ResourceError
from kvlab.spec import ResourcesConfig

REFRESH_SECONDS = 10.0
"""A query takes a millisecond, and a machine that joins saves minutes."""

_TOLERANCE = 1e-6  # of sums of fractions

ListMachines = Callable[[], Sequence[dict[str, float]]]
"""Return the resources of each living machine of a cluster: ``CPU``, ``GPU`` and others."""


class Capacity:
    """The room in a cluster, whose machines come and go.

    Args:
        list_machines: Queries the cluster.
        clock: Returns seconds.

    Attributes:
        cpus, gpus: Of all machines together, at the last query.
    """

    def __init__(self, list_machines: ListMachines, clock: Callable[[], float] = time.monotonic):
        self._list_machines, self._clock = list_machines, clock
        self.cpus = self.gpus = 0.0
        self.refresh()

    def refresh(self) -> None:
        """Query the cluster.

        The last answer stays if the cluster does not answer or has no machine. Then this process
        is cut off from it, which the start of a task notices and repairs.
        """
        self._refreshed = self._clock()
        with contextlib.suppress(Exception):  # of many kinds, all of them Ray's
            if machines := self._list_machines():
                self.cpus = sum(machine.get("CPU", 0.0) for machine in machines)
                self.gpus = sum(machine.get("GPU", 0.0) for machine in machines)

    def has_room(self, resources: ResourcesConfig, running: Iterable[ResourcesConfig]) -> bool:
        """Return whether the cluster as a whole has room beside what runs.

        A task that fits no single machine yet waits in Ray's queue.
        """
        if self._clock() - self._refreshed >= REFRESH_SECONDS:
            self.refresh()
        wanted = [*running, resources]
        has_cpus = sum(one.cpus for one in wanted) <= self.cpus + _TOLERANCE
        return has_cpus and sum(one.devices for one in wanted) <= self.gpus + _TOLERANCE

    def check_requests(self, requests: Iterable[ResourcesConfig]) -> None:
        """Raise ResourceError if a request fits no single machine."""
        listed = self._list_machines()
        machines = [(one.get("CPU", 0.0), one.get("GPU", 0.0)) for one in listed]
        offers = "; ".join(sorted({f"{cpus:g} CPUs and {gpus:g} GPUs" for cpus, gpus in machines}))
        for request in requests:
            if not any(
                cpus + _TOLERANCE >= request.cpus and gpus + _TOLERANCE >= request.devices
                for cpus, gpus in machines
            ):
                text = f"resources.cpus = {request.cpus:g} and resources.gpus = {request.devices:g}"
                text += f" fit no machine here ({offers or 'there is none'})"
                raise ResourceError(f"{text}; lower what is too much or use a larger machine")


def cpu_count() -> int:
    """Return the cores that this process may use; a container or taskset may limit them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return min(allowed or 1, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return allowed or 1
