"""The resources of a cluster, and how much of them kvlab's tasks have."""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence

from kvlab.errors import ResourceError
from kvlab.spec import ResourcesConfig

REFRESH_SECONDS = 10.0
"""A query takes a millisecond, and a machine that joins saves minutes."""

_TOLERANCE = 1e-6  # of sums of fractions

KIND = "accelerator_type:"
"""Prefix of the resource that names the kind of a machine's GPUs in Ray."""

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
        self._machines: list[dict[str, float]] = []
        self.refresh()

    @property
    def cpus(self) -> float:
        return sum(machine.get("CPU", 0.0) for machine in self._machines)

    @property
    def gpus(self) -> float:
        return self._count_gpus(None)

    def _count_gpus(self, kind: str | None) -> float:
        """Return the number of GPUs of one kind, or of all."""
        own = (one for one in self._machines if kind is None or KIND + kind in one)
        return sum(machine.get("GPU", 0.0) for machine in own)

    def refresh(self) -> None:
        """Query the cluster.

        The last answer stays if the cluster does not answer or has no machine. Then this process
        is cut off from it, which the start of a task notices and repairs.
        """
        self._refreshed = self._clock()
        with contextlib.suppress(Exception):  # of many kinds, all of them Ray's
            self._machines = list(self._list_machines()) or self._machines

    def has_room(self, resources: ResourcesConfig, running: Iterable[ResourcesConfig]) -> bool:
        """Return whether the cluster as a whole has room beside what runs.

        A task that fits no single machine yet waits in Ray's queue.
        """
        if self._clock() - self._refreshed >= REFRESH_SECONDS:
            self.refresh()
        wanted = [*running, resources]
        kinds = {None, resources.accelerator_type}
        return sum(one.cpus for one in wanted) <= self.cpus + _TOLERANCE and all(
            sum(one.devices for one in wanted if kind in (None, one.accelerator_type))
            <= self._count_gpus(kind) + _TOLERANCE
            for kind in kinds
        )

    def check_requests(self, requests: Iterable[ResourcesConfig]) -> None:
        """Raise ResourceError if a request fits no single machine."""
        machines = self._list_machines()
        for request in requests:
            if any(_fits(request, machine) for machine in machines):
                continue
            text = f"resources.cpus = {request.cpus:g} and resources.gpus = {request.devices:g}"
            if request.accelerator_type is not None:
                text += f" of resources.accelerator_type = {request.accelerator_type}"
            offers = "; ".join(sorted(set(map(_describe, machines)))) or "there is none"
            hint = "lower what is too much or use a larger machine"
            raise ResourceError(f"{text} fit no machine here ({offers}); {hint}")


def _fits(request: ResourcesConfig, machine: dict[str, float]) -> bool:
    kind = request.accelerator_type
    has_cpus = machine.get("CPU", 0.0) + _TOLERANCE >= request.cpus
    has_gpus = machine.get("GPU", 0.0) + _TOLERANCE >= request.devices
    return has_cpus and has_gpus and (kind is None or KIND + kind in machine)


def _describe(machine: dict[str, float]) -> str:
    kinds = [name.removeprefix(KIND) for name in machine if name.startswith(KIND)]
    count = f"{machine.get('CPU', 0.0):g} CPUs and {machine.get('GPU', 0.0):g} GPUs"
    return " ".join([count, *(f"({kind})" for kind in kinds)])
