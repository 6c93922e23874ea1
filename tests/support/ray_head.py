"""Start a Ray cluster of one machine on loopback for the length of a block."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.sweep.executors.reaper import reap

ROOT = Path(__file__).parents[2]


@contextmanager
def ray_head(*options: str, **environment: str) -> Iterator[str]:
    """Start a head with 2 CPUs, yield its address, and end all its processes.

    Args:
        options: Further options of ``ray start``.
        environment: Environment variables of its processes.
    """
    folder = os.path.realpath(tempfile.mkdtemp(prefix="kvlab-", dir="/tmp"))
    ports = {name: _free_port() for name in ("port", "dashboard-agent-listen-port")}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=2"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    command += ["--include-dashboard=False"]
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
        yield f"127.0.0.1:{ports['port']}"
    finally:
        reap(folder, os.getpid())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
