"""The capacity of a cluster, whose machines are given as a list."""

import pytest

from kvlab.errors import ResourceError
from kvlab.spec import ResourcesConfig
from kvlab.sweep.executors.capacity import REFRESH_SECONDS, Capacity

CPU_MACHINE, GPU_MACHINE = {"CPU": 64.0}, {"CPU": 4.0, "GPU": 1.0}


class Cluster:
    """Machines that join and leave, and a clock."""

    def __init__(self, *machines):
        self.machines, self.seconds, self.away = list(machines), 0.0, False

    def __call__(self):
        if self.away:
            raise ConnectionError("the cluster does not answer")
        return self.machines

    def capacity(self):
        return Capacity(self, lambda: self.seconds)


def asks(cpus, gpus=0.0):
    return ResourcesConfig(cpus=cpus, gpus=gpus)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (asks(65), "resources.cpus = 65 and resources.gpus = 0 fit no machine here"),
        (asks(1, 2), "resources.cpus = 1 and resources.gpus = 2 fit no machine here"),
        (asks(8, 1), "resources.cpus = 8 and resources.gpus = 1 fit no machine here"
                     " (4 CPUs and 1 GPUs; 64 CPUs and 0 GPUs); lower what is too much"),
    ],
)  # fmt: skip
def test_what_one_machine_holds_passes_and_more_is_refused(request_, expected):
    capacity = Cluster(CPU_MACHINE, GPU_MACHINE).capacity()
    capacity.check_requests([asks(64), asks(4, 1), asks(0.5, 0.25), asks(1)])
    with pytest.raises(ResourceError) as caught:
        capacity.check_requests([asks(1), request_])
    assert expected in str(caught.value)


def test_a_machine_that_joins_or_leaves_counts_after_a_while():
    cluster = Cluster({"CPU": 1.0})
    capacity = cluster.capacity()
    capacity.acquire(asks(1))
    cluster.machines.append({"CPU": 2.0, "GPU": 1.0})
    assert not capacity.has_room(asks(1))  # asked for a moment ago
    cluster.seconds += REFRESH_SECONDS
    assert capacity.has_room(asks(2, 1))
    assert not capacity.has_room(asks(2.5))
    assert (capacity.cpus, capacity.gpus) == (3.0, 1.0)
    capacity.release(asks(1))
    assert capacity.has_room(asks(2.5))
    cluster.machines.pop()
    cluster.seconds += REFRESH_SECONDS
    assert not capacity.has_room(asks(1.5))


@pytest.mark.parametrize("lost", ["no answer", "no machine"])
def test_a_cluster_that_is_cut_off_keeps_the_room_it_had(lost):
    cluster = Cluster({"CPU": 1.0})
    capacity = cluster.capacity()
    if lost == "no answer":
        cluster.away = True
    else:
        cluster.machines.clear()
    cluster.seconds += REFRESH_SECONDS
    assert capacity.has_room(asks(1))


def test_fractions_fill_a_device_exactly():
    capacity = Cluster({"CPU": 1.0, "GPU": 1.0}).capacity()
    for _ in range(10):
        assert capacity.has_room(asks(0.1, 0.1))
        capacity.acquire(asks(0.1, 0.1))
    assert not capacity.has_room(asks(0.1, 0.1))
