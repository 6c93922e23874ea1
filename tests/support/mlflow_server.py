"""A real MLflow server on loopback that stores artifacts itself, as a remote one does."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from kvlab.track.connection import server_command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


class Server:
    """An MLflow server with its database and artifacts in ``home``; it can be killed and restarted."""

    def __init__(self, home: Path):
        self.home, self.port = home, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        home.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        command = server_command(f"sqlite:///{self.home}/mlflow.db", self.home, self.port)
        index = command.index("--default-artifact-root")
        command[index : index + 2] = ["--artifacts-destination", str(self.home / "artifacts")]
        with open(self.home / "log", "ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.home,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        for _ in range(1000):
            try:
                assert get(f"{self.uri}/health") == "OK"
                return
            except OSError:
                assert self._process.poll() is None, (self.home / "log").read_text()
                time.sleep(0.2)
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        """Kill the server and its workers."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
