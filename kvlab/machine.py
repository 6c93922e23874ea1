"""What this process may use of its machine; containers, jobs of a cluster and taskset limit it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def cpu_count() -> int:
    """Return the cores that this process may use.

    A job of Slurm has as many as it was given, which not every cluster enforces.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = [allowed or 1]
    for text in _read_limits("cpu.max"):
        quota, _, period = text.partition(" ")
        limits += [int(quota) // int(period)] if quota.isdigit() else []
    given = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE", "")
    limits += [int(given)] if given.isdigit() else []
    return max(1, min(limits))


def host_memory() -> int:
    """Return the bytes that this process and its siblings may use."""
    import psutil

    limits = _read_limits("memory.max", "memory.limit_in_bytes")
    return min([int(psutil.virtual_memory().total), *map(int, filter(str.isdigit, limits))])


def _read_limits(*names: str) -> Iterator[str]:
    """Yield the texts of files of this process's cgroup and of all that it is in.

    Args:
        names: In version 2, and in version 1, where every controller has a hierarchy of its own.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = _OWN_CGROUPS.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = _CGROUPS / controllers  # in version 2 there is no name of a controller
        group = root / path.lstrip("/")  # a container may see its own as the root alone
        for folder in (group, *(one for one in group.parents if one.is_relative_to(root))):
            for name in names:
                with contextlib.suppress(OSError):
                    yield (folder / name).read_text().strip()
