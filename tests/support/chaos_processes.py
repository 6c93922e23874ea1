"""The processes that are killed: a Ray cluster of two nodes on this machine, and drivers.

This process becomes the subreaper of all that it starts. A process that outlives its parent becomes
a child of this one, so that no orphan goes unnoticed. Linux only.
"""

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent.parent
OBJECT_STORE_BYTES = 80 * 2**20
TIMEOUT_SECONDS = 120.0
"""Time for a node to start on a busy machine."""
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make orphans below this process its children from now on."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no subreaper on this system")


def family(pid: int | None = None) -> list[psutil.Process]:
    """Return every living process below ``pid``, by default below this one."""
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if lives(process)]


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> str:
    """Return the command line of a process; empty once it is gone."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""


def trial_workers(pid: int | None = None) -> list[psutil.Process]:
    """Return the Ray workers that run a trial now."""
    return [process for process in family(pid) if title(process).startswith("ray::kvlab_trial")
            or title(process).startswith("ray::kvlab trial")]  # fmt: skip


def kill(*processes: psutil.Process) -> int:
    """Send SIGKILL to all; return how many received it."""
    killed = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
            killed += 1
    return killed


def bury(spared: set[int]) -> None:
    """Read the exit codes of adopted children, but not of those in ``spared``."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            if child.pid not in spared and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


class TwoNodes:
    """A Ray cluster: a head, and a second node that can be killed and replaced."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster()
        self._cluster.add_node(wait=False, **_node())
        self.address = str(self._cluster.address)
        self._second: Any = self._add()

    def _add(self) -> Any:
        node = self._cluster.add_node(wait=False, **_node())
        self._cluster._wait_for_node(node, timeout=TIMEOUT_SECONDS)  # its own would be 30
        return node

    def raylet(self) -> list[psutil.Process]:
        """Return the raylet of the second node, without its workers."""
        return [process for process in self.second_node() if process.name() == "raylet"]

    def second_node(self) -> list[psutil.Process]:
        """Return every process of the second node, with its workers."""
        own = [psutil.Process(process.pid) for _, process in self._second.live_processes()]
        return own + [worker for process in own for worker in family(process.pid)]

    def replace_second_node(self) -> None:
        """Start a second node in place of the one that was killed."""
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = self._add()

    def pids(self) -> set[int]:
        """Return the ids of the daemons that Ray started for the two nodes, alive or not."""
        nodes = [self._cluster.head_node, self._second]
        return {
            info.process.pid
            for node in nodes
            for infos in node.all_processes.values()
            for info in infos
        }

    def close(self) -> None:
        self._cluster.shutdown()


def _node() -> dict[str, Any]:
    memory = {"object_store_memory": OBJECT_STORE_BYTES}
    return {"num_cpus": 1, "include_dashboard": False, **memory}


def set_environment(folder: Path) -> None:
    """Set the data folder, Ray's folder and the cluster's token for all processes below."""
    os.environ.update(
        KVLAB_DATA=str(folder / "data"),
        RAY_TMPDIR=tempfile.mkdtemp(prefix="ray-", dir=folder),
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=f"{random.SystemRandom().getrandbits(256):064x}",
        RAY_USAGE_STATS_ENABLED="0",
        PYTHONPATH=str(ROOT),  # for workers, which do not start in this folder
        OMP_NUM_THREADS="1",
    )
    for name in ("MLFLOW_TRACKING_URI", "KVLAB_STORE", "RAY_ADDRESS"):
        os.environ.pop(name, None)


def submit(folder: Path, store: Path, log: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start a driver in a process of its own, which writes its output to ``log``."""
    command = [sys.executable, "-m", "kvlab.cli.main", "submit", str(folder / "s.yaml")]
    with open(log, "ab") as output:
        return subprocess.Popen(
            [*command, "--store", str(store), "--no-report", *options], cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
