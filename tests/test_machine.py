"""What a process may use: limits are those of cgroups in folders of the test, and of Slurm."""

import os

import pytest

from kvlab import machine
from kvlab.machine import cpu_count, host_memory

GIB = 2**30


@pytest.fixture(autouse=True)
def cgroups(tmp_path, monkeypatch):
    """Return a function that puts this process into a cgroup, with files at given places."""

    def enter(line, **files):
        (tmp_path / "own").write_text(line + "\n")
        for place, text in files.items():
            path = tmp_path / "fs" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    return enter


def test_without_limits_it_is_the_machine_or_the_affinity():
    total = host_memory()
    assert (cpu_count(), total > GIB / 2) == (64, True)


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ("0::/", ""),  # a container
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", "system.slice/"),
        ("0::/system.slice/job_7/step_0", "system.slice/job_7/"),
        ("0::/not/seen/in/this/container", ""),
    ],
)
def test_the_limits_of_every_cgroup_around_it_count(cgroups, line, folder):
    files = {f"{folder}memory.max": f"{GIB // 4}", f"{folder}cpu.max": "800000 100000"}
    own = line.partition("::/")[2]
    cgroups(
        line,
        **files,
        **({f"{own}/memory.max": "max", f"{own}/cpu.max": "max 100000"} if own else {}),
    )
    assert (cpu_count(), host_memory()) == (8, GIB // 4)


def test_a_limit_of_version_1_counts_as_does_that_of_a_fraction_of_a_core(cgroups):
    place = "memory/slurm/uid_0/job_7/memory.limit_in_bytes"
    most = "9223372036854771712"
    cgroups(
        "9:memory:/slurm/uid_0/job_7/step_batch",
        **{place: f"{GIB // 8}", "memory/memory.limit_in_bytes": most, "cpu.max": "1000 1"},
    )
    assert (cpu_count(), host_memory()) == (64, GIB // 8)
    cgroups("0::/", **{"cpu.max": "50000 100000"})
    assert cpu_count() == 1


def test_a_job_of_slurm_has_the_cores_that_it_was_given(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "12")
    assert cpu_count() == 12
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    assert cpu_count() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 6})
    assert cpu_count() == 2
