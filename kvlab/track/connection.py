"""The way to MLflow: its client, made once, quiet, and with errors that people can act on."""

import logging
import os
import re
import shutil
import socket
import sqlite3
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.errors import StoreError, TrackingError, UsageError
from kvlab.fs.atomic_files import write_atomic
from kvlab.fs.lock import Lock

if TYPE_CHECKING:
    from mlflow import MlflowClient


_MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Else `kvlab ui` starts seven more processes, for jobs that kvlab has none of.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    # Else it prints two lines a run, into the midst of --json.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Else a server that is away is asked for four minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
}

PROBE_SECONDS = 5.0
"""How long a server may take to say anything at all, before the first real question."""


LOCK_PATIENCE_SECONDS = 600.0


def tracking_uri(store: Path, uri: str | None) -> str:
    """What was asked for, else MLFLOW_TRACKING_URI, else a database in the store."""
    found = uri or os.environ.get("MLFLOW_TRACKING_URI")
    return found or f"sqlite:///{store.absolute()}/mlflow.db"


def is_server(uri: str) -> bool:
    """Whether MLflow runs elsewhere and keeps artifacts itself."""
    return uri.startswith(("http://", "https://"))


def silence_mlflow() -> None:
    """Settings for MLflow, before it is imported; what the environment says stays."""
    for name, value in _MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)


def connect(store: Path, uri: str) -> "MlflowClient":
    """A client whose database is whole: made by one process, while others wait.

    Raises:
        TrackingError: MLflow cannot be reached, or its database cannot be opened.
        UsageError: the address is that of a folder.
    """
    silence_mlflow()
    _refuse_folder(uri)
    with translate_errors(uri):
        if is_server(uri):
            _probe_server(uri)
            return _open_client(uri)
        store.mkdir(parents=True, exist_ok=True)
        with hold_mlflow_lock(store):
            _check_database(uri)
            _create_database(uri, store)
            return _open_client(uri)


def _refuse_folder(uri: str) -> None:
    bare = "://" not in uri and uri.partition(":")[0] not in ("databricks", "databricks-uc")
    if bare or uri.startswith("file:"):
        text = f"--tracking-uri = {uri} names a folder, where MLflow keeps no runs any more"
        raise UsageError(f"{text}; use sqlite:///PATH or the http:// address of a server")


def _probe_server(uri: str) -> None:
    """Fails soon where nobody answers: MLflow would ask again and again, for a minute or more."""
    import requests

    try:
        place = f"{uri.rstrip('/')}/health"
        requests.get(place, timeout=PROBE_SECONDS, allow_redirects=False, stream=True).close()
    except requests.exceptions.SSLError:
        return  # somebody answers; MLflow has settings of its own for that
    except requests.Timeout:
        reason = f"no answer in {PROBE_SECONDS:g} s"
    except requests.ConnectionError:
        reason = "nobody answers there"
    else:
        return
    raise TrackingError(f"MLflow at {redact_uri(uri)}: {reason}; {_hint(uri)}")


def _sqlite_path(uri: str) -> Path | None:
    """Where a database in a file is; None if it is none, or its settings are its owner's."""
    path, question, _ = uri.removeprefix("sqlite:///").partition("?")
    plain = uri.startswith("sqlite:///") and path and not path.startswith(":") and not question
    return Path(path) if plain else None


@contextmanager
def hold_mlflow_lock(store: Path) -> Iterator[None]:
    """One process at a time talks to MLflow on behalf of a store.

    Raises:
        TrackingError: the store cannot be written, or another process does not come to an end.
    """
    lock = Lock(store / "mlflow.lock")
    try:
        ours = lock.acquire(timeout=LOCK_PATIENCE_SECONDS)
    except StoreError as error:
        raise TrackingError(str(error)) from None
    if not ours:
        text = (
            f"{lock.describe_holder()} has been writing there for {LOCK_PATIENCE_SECONDS:g} seconds"
        )
        raise TrackingError(f"{text}; `kvlab sync` catches up")
    try:
        yield
    finally:
        lock.release()


def _check_database(uri: str) -> None:
    """Fails at once if a database file cannot be opened: MLflow would try for minutes."""
    path = _sqlite_path(uri)
    if path is not None and path.exists():
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA schema_version")


def _create_database(uri: str, store: Path) -> None:
    """Makes a new database whole or not at all: MLflow takes seconds for its many tables, and
    cannot go on from half of them after a kill or on a full disk."""
    path = _sqlite_path(uri)
    if path is None or path.exists():
        return
    for leftover in store.glob(".mlflow-*"):  # of a kill; ours alone, by the store's lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".mlflow-", dir=store) as folder:
        made = Path(folder) / "mlflow.db"
        _open_client(f"sqlite:///{made}")
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        shutil.copyfile(made, temporary)  # the store may be on another disk than the database
        try:
            os.link(temporary, path)  # unlike a rename, it spares what another store made
        except FileExistsError:
            pass
        except OSError:  # no hard links here
            os.rename(temporary, path)
        temporary.unlink(missing_ok=True)


def _open_client(uri: str) -> "MlflowClient":
    from mlflow import MlflowClient

    silence_mlflow()  # importing it sets its loggers up
    client = MlflowClient(tracking_uri=uri)
    client.search_experiments(max_results=1)  # makes or upgrades the tables, or fails
    return client


def read_store_id(store: Path) -> str:
    """A random name of this store: of the runs on a shared server only these are ours."""
    path = store / "tracking.id"
    try:
        if not path.exists():
            with hold_mlflow_lock(store):
                if not path.exists():
                    write_atomic(path, uuid.uuid4().hex + "\n")
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; check its rights") from None


@contextmanager
def translate_errors(uri: str) -> Iterator[None]:
    """Turns whatever MLflow and what is below it raise into a `TrackingError`."""
    try:
        yield
    except (TrackingError, StoreError):
        raise
    except Exception as error:
        if not _is_mlflow_error(error):
            raise
        reason = re.sub(r"://[^/\s@]*@", "://", " ".join(str(error).split()))  # passwords
        reason = reason if len(reason) <= 300 else reason[:300] + "..."
        raise TrackingError(f"MLflow at {redact_uri(uri)}: {reason}; {_hint(uri)}") from error


def _is_mlflow_error(error: BaseException) -> bool:
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return bool(
        packages & {"mlflow", "sqlalchemy", "alembic", "requests", "urllib3", "sqlite3"}
    ) or (isinstance(error, OSError | ImportError))


def redact_uri(uri: str) -> str:
    """Without a password."""
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _hint(uri: str) -> str:
    if is_server(uri):
        return "start it or name another with --tracking-uri; `kvlab sync` catches up"
    if uri.startswith("sqlite:"):
        return "if the file is damaged, delete it: `kvlab sync` makes it again from the record"
    return "use sqlite:///PATH, another database, or the http:// address of a server"


# MLflow's own server on the store's database, for looking at it on this machine.


HOST = "127.0.0.1"


def serve_ui(store: Path, uri: str | None, port: int) -> int:
    """Becomes MLflow's server, on the loopback interface alone; returns only if it cannot.

    Raises:
        UsageError: the port is taken.
    """
    silence_mlflow()
    # Another server's settings would come before the arguments below.
    environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
    # Else seven processes wait for jobs that nobody here gives them.
    environment.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    _check_port(port)
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


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            text = f"--port = {port} cannot be used ({error.strerror})"
            raise UsageError(f"{text}; name another, such as --port {port % 65000 + 1}") from None
