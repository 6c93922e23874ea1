"""What this machine has."""

import os


def cpu_count() -> int:
    """Cores that this process may use: fewer than the machine's in a container or under taskset."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(allowed or 1, _container_limit())


def _container_limit() -> int:
    """The whole cores of a cgroup v2 quota; very many if there is none."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return 1_000_000
