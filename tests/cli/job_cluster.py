"""A Ray cluster of one machine with a job server, on loopback, for the length of a block."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from kvlab.sweep.executors.reaper import reap

ROOT = Path(__file__).parent.parent.parent
NEEDED = ("aiohttp_cors", "grpc", "opencensus", "prometheus_client")
MISSING = [name for name in NEEDED if find_spec(name) is None]


@contextmanager
def job_cluster(**environment: str) -> Iterator[str]:
    """Starts a head; gives the address of its job server. Nothing of it is left behind."""
    folder = os.path.realpath(tempfile.mkdtemp(prefix="kvlab-", dir="/tmp"))
    ports = [_free_port() for _ in range(4)]
    names = (
        "--port",
        "--dashboard-port",
        "--ray-client-server-port",
        "--dashboard-agent-listen-port",
    )
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=2"]
    command += [f"{name}={port}" for name, port in zip(names, ports, strict=True)]
    command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
    command += ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--disable-usage-stats"]
    command += [f"--object-store-memory={80 * 2**20}", "--min-worker-port=0", "--max-worker-port=0"]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            timeout=100,
            cwd=folder,
            env={**os.environ, **own, **environment},
        )
        yield f"http://127.0.0.1:{ports[1]}"
    finally:
        reap(folder, os.getpid())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
