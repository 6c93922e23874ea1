"""A real MLflow server on loopback that stores artifacts itself, as a remote one does."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.track.connection import server_command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@contextmanager
def serve_mlflow(home: Path) -> Iterator[str]:
    """Serve the database in ``home`` and yield the address; the server ends with the block."""
    port = free_port()
    command = server_command(f"sqlite:///{home}/mlflow.db", home, port)
    index = command.index("--default-artifact-root")
    command[index : index + 2] = ["--artifacts-destination", str(home / "artifacts")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    options = {"cwd": home, "start_new_session": True, "env": environment}
    with open(home / "log", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, **options)
    try:
        _wait(f"http://127.0.0.1:{port}", process, home / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with its workers
        process.wait()


def _wait(uri: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(1000):
        try:
            assert get(f"{uri}/health") == "OK"
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
    raise AssertionError("the server does not answer")
