"""Start a Ray cluster of one machine on loopback for the length of a block."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvlab.sweep.executors.reaper import reap

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Head:
    """Addresses of a cluster and of its job server, if it has one."""

    address: str
    jobs: str


@contextmanager
def ray_head(*options: str, dashboard: bool = False, **environment: str) -> Iterator[Head]:
    """Start a head with 2 CPUs, and end all its processes.

    Args:
        options: Further options of ``ray start``.
        environment: Environment variables of its processes.
    """
    folder = os.path.realpath(tempfile.mkdtemp(prefix="kvlab-", dir="/tmp"))
    names = ["port", "dashboard-port", "dashboard-agent-listen-port"]
    if dashboard:  # it brings in Ray's client server
        names.append("ray-client-server-port")
    ports = {name: _free_port() for name in names}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=2"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    command += [f"--include-dashboard={dashboard}", "--dashboard-host=127.0.0.1"]
    command += ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--disable-usage-stats"]
    command += [f"--object-store-memory={80 * 2**20}", "--min-worker-port=0", "--max-worker-port=0"]
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",  # ignore a token of the user: it is on loopback
    }
    try:
        subprocess.run(
            [*command, *options],
            check=True,
            capture_output=True,
            timeout=100,
            cwd=folder,
            env={**os.environ, **own, **environment},
        )
        yield Head(f"127.0.0.1:{ports['port']}", f"http://127.0.0.1:{ports['dashboard-port']}")
    finally:
        reap(folder, os.getpid())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
