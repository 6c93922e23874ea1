"""MLflow's own server on the store's database, for looking at it on this machine."""

import os
import socket
import sys
from pathlib import Path

from kvlab.errors import UsageError
from kvlab.track.connection import quiet, tracking_uri

HOST = "127.0.0.1"


def serve_ui(store: Path, uri: str | None, port: int) -> int:
    """Becomes MLflow's server, on the loopback interface alone; returns only if it cannot.

    Raises:
        UsageError: the port is taken.
    """
    quiet()
    # Another server's settings would come before the arguments below.
    environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
    # Else seven processes wait for jobs that nobody here gives them.
    environment.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    _check_free(port)
    sys.stdout.flush()
    command = server_command(tracking_uri(store, uri), store, port)
    os.execve(sys.executable, command, environment)
    return 1


def server_command(uri: str, store: Path, port: int) -> list[str]:
    """The command that serves a database. Artifacts stay where the tracker put them."""
    return [
        sys.executable, "-m", "mlflow", "server",
        "--backend-store-uri", uri,
        "--default-artifact-root", (store.absolute() / "mlartifacts").as_uri(),
        "--host", HOST,
        "--port", str(port),
        "--workers", "1",
    ]  # fmt: skip


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            text = f"--port = {port} cannot be used ({error.strerror})"
            raise UsageError(f"{text}; name another, such as --port {port % 65000 + 1}") from None
