"""The capacity of a cluster, whose machines are given as a list."""

import pytest

from kvlab.errors import ResourceError
from kvlab.spec import ResourcesConfig
from kvlab.sweep.executors.capacity import REFRESH_SECONDS, Capacity


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


def asks(cpus, gpus=0.0, kind=None):
    return ResourcesConfig(cpus=cpus, gpus=gpus, accelerator_type=kind)


@pytest.mark.parametrize(("cpus", "gpus"), [(65, 0), (1, 2), (8, 1)])
def test_what_one_machine_holds_passes_and_more_is_refused(cpus, gpus):
    capacity = Cluster({"CPU": 64.0}, {"CPU": 4.0, "GPU": 1.0}).capacity()
    capacity.check_requests([asks(64), asks(4, 1), asks(0.5, 0.25), asks(1)])
    with pytest.raises(ResourceError) as caught:
        capacity.check_requests([asks(1), asks(cpus, gpus)])
    text = f"resources.cpus = {cpus} and resources.gpus = {gpus} fit no machine here"
    offers = "(4 CPUs and 1 GPUs; 64 CPUs and 0 GPUs)"
    assert str(caught.value).startswith(f"{text} {offers}; lower what is too much")


def test_a_machine_that_joins_or_leaves_counts_after_a_while_and_stays_without_an_answer():
    cluster = Cluster({"CPU": 1.0}, {"memory": 1.0})
    capacity, running = cluster.capacity(), [asks(1)]
    cluster.machines.append({"CPU": 2.0, "GPU": 1.0})
    assert not capacity.has_room(asks(1), running)  # asked for a moment ago
    cluster.seconds += REFRESH_SECONDS
    assert capacity.has_room(asks(2, 1), running)
    assert not capacity.has_room(asks(2.5), running)
    assert (capacity.cpus, capacity.gpus) == (3.0, 1.0)
    assert capacity.has_room(asks(2.5), [])
    cluster.machines.pop()
    cluster.seconds += REFRESH_SECONDS
    assert not capacity.has_room(asks(1.5), [])
    for cluster.away in (True, False):  # cut off, or without any machine
        cluster.machines.clear()
        cluster.seconds += REFRESH_SECONDS
        assert capacity.has_room(asks(1), [])


def test_fractions_fill_a_device_exactly():
    capacity = Cluster({"CPU": 1.0, "GPU": 1.0}).capacity()
    assert capacity.has_room(asks(0.1, 0.1), [asks(0.1, 0.1)] * 9)
    assert not capacity.has_room(asks(0.1, 0.1), [asks(0.1, 0.1)] * 10)


def test_gpus_of_a_kind_are_counted_apart_and_one_that_is_not_there_is_refused():
    fast = {"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0}
    slow = {"CPU": 8.0, "GPU": 4.0, "accelerator_type:A100": 1.0}
    capacity = Cluster(fast, slow).capacity()
    assert capacity.has_room(asks(1, 1, "H100"), [asks(1, 1, "H100"), asks(1, 4, "A100")])
    assert not capacity.has_room(asks(1, 1, "H100"), [asks(1, 2, "H100")])
    assert capacity.has_room(asks(1, 1), [asks(1, 2, "H100")])
    assert not capacity.has_room(asks(1, 1, "H100"), [asks(1, 6)])
    capacity.check_requests([asks(1, 2, "H100"), asks(1, 4, "A100"), asks(1, 4)])
    for gpus, kind in ((4, "H100"), (1, "H200")):
        with pytest.raises(ResourceError) as caught:
            capacity.check_requests([asks(1, gpus, kind)])
        text = f"resources.gpus = {gpus} of resources.accelerator_type = {kind} fit no machine here"
        offers = "(8 CPUs and 2 GPUs (H100); 8 CPUs and 4 GPUs (A100))"
        assert f"{text} {offers}" in str(caught.value)
