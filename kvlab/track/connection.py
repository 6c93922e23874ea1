"""Connect to MLflow: its client, its database in the store, its server, and its errors.

mlflow is imported when a connection is made, not with this module.
"""

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
from traceback import walk_tb
from typing import TYPE_CHECKING

from kvlab.errors import StoreError, TrackingError, UsageError
from kvlab.fs.atomic_files import read_regular, write_atomic
from kvlab.fs.lock import Lock
from kvlab.fs.sealed_files import set_aside
from kvlab.humanize import redact_url

if TYPE_CHECKING:
    from mlflow import MlflowClient


_MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Otherwise `kvlab ui` starts seven more processes, for jobs that kvlab does not use.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    # Otherwise it prints two lines per run to standard output, which holds our JSON.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Otherwise it retries an unreachable server for four minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
}

_MLFLOW_PACKAGES = {"mlflow", "sqlalchemy", "alembic", "requests", "urllib3", "sqlite3"}

PROBE_SECONDS = 5.0
"""How long a server may take to answer the probe before the first request."""

LOCK_TIMEOUT_SECONDS = 600.0

HOST = "127.0.0.1"


def tracking_uri(store: Path, uri: str | None) -> str:
    """Return ``uri``, or MLFLOW_TRACKING_URI, or that of a database in the store."""
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
    return uri or f"sqlite:///{store.absolute()}/mlflow.db"


def check_uri(uri: str) -> None:
    """Raise UsageError for the name of a folder."""
    is_path = "://" not in uri and uri.partition(":")[0] not in ("databricks", "databricks-uc")
    if is_path or uri.startswith("file:"):
        is_variable = os.environ.get("MLFLOW_TRACKING_URI") == uri
        name = "MLFLOW_TRACKING_URI" if is_variable else "--tracking-uri"
        text = f"{name} = {uri} names a folder, and MLflow no longer keeps runs in folders"
        raise UsageError(f"{text}; use sqlite:///PATH or the http:// address of a server")


def set_database_aside(store: Path, uri: str | None) -> Path:
    """Move the store's database of MLflow, and its id, into a new folder under ``damaged/``.

    Raises:
        UsageError: MLflow is elsewhere, where other runs may be, or there is no database.
    """
    if tracking_uri(store, uri) != f"sqlite:///{store.absolute()}/mlflow.db":
        text = f"--rebuild: MLflow is at {redact_url(tracking_uri(store, uri))}, not in the store"
        raise UsageError(f"{text}, and may have runs of others; mend it there, then `kvlab sync`")
    names = [*(f"mlflow.db{suffix}" for suffix in ("", "-wal", "-shm", "-journal")), "tracking.id"]
    if not any(os.path.lexists(store / name) for name in names):
        raise UsageError(f"--rebuild: {store} has no database of MLflow; leave it out")
    with hold_mlflow_lock(store):
        return set_aside(store, names)


def is_server(uri: str) -> bool:
    """Return whether ``uri`` is that of an MLflow server, which stores artifacts itself."""
    return uri.startswith(("http://", "https://"))


def silence_mlflow() -> None:
    """Set MLflow's environment and loggers. Variables that are set already keep their values."""
    for name, value in _MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # It prints the traceback of what it raises; kvlab reports that in a line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def connect(store: Path, uri: str) -> "MlflowClient":
    """Return a client of MLflow; one process creates a missing database while others wait.

    Raises:
        TrackingError: MLflow cannot be reached, or its database cannot be opened.
        UsageError: ``uri`` is a folder.
    """
    silence_mlflow()
    check_uri(uri)
    with translate_errors(uri):
        if is_server(uri):
            _probe_server(uri)
            return _open_client(uri)
        store.mkdir(parents=True, exist_ok=True)
        file, question_mark, _ = uri.removeprefix("sqlite:///").partition("?")
        is_file = uri.startswith("sqlite:///") and file[:1] not in ("", ":") and not question_mark
        with hold_mlflow_lock(store):
            if is_file and Path(file).exists():
                # MLflow would retry for minutes where the file cannot be opened
                with closing(sqlite3.connect(file)) as database:
                    database.execute("PRAGMA schema_version")
            elif is_file:
                _create_database(Path(file), store)
            return _open_client(uri)


def _probe_server(uri: str) -> None:
    """Raise TrackingError if no server answers: MLflow itself would retry for a minute or more."""
    import requests

    try:
        url = f"{uri.rstrip('/')}/health"
        requests.get(url, timeout=PROBE_SECONDS, allow_redirects=False, stream=True).close()
    except requests.exceptions.SSLError:
        pass  # a server answers; MLflow has its own settings for certificates
    except (requests.Timeout, requests.ConnectionError) as error:
        is_late = isinstance(error, requests.Timeout)
        reason = f"no answer in {PROBE_SECONDS:g} s" if is_late else "no server answers there"
        raise TrackingError(f"MLflow at {redact_url(uri)}: {reason}; {_hint(uri)}") from None


@contextmanager
def hold_mlflow_lock(store: Path) -> Iterator[None]:
    """Hold the store's MLflow lock: one process at a time writes to MLflow for a store.

    Raises:
        TrackingError: the store cannot be written, or another process does not finish.
    """
    lock = Lock(store / "mlflow.lock")
    try:
        if lock.acquire(timeout=LOCK_TIMEOUT_SECONDS) is None:
            text = f"{lock.describe_holder()} has been writing there for {LOCK_TIMEOUT_SECONDS:g}"
            raise TrackingError(f"{text} seconds; `kvlab sync` catches up")
    except StoreError as error:
        raise TrackingError(str(error)) from None
    try:
        yield
    finally:
        lock.release()


def _create_database(path: Path, store: Path) -> None:
    """Create a new database atomically.

    MLflow takes seconds to create its tables, and cannot continue from some of them after a kill
    or on a full disk.
    """
    for leftover in store.glob(".mlflow-*"):  # of a killed process; the lock makes them ours
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".mlflow-", dir=store) as folder:
        database = Path(folder) / "mlflow.db"
        _open_client(f"sqlite:///{database}")
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            shutil.copyfile(database, temporary)  # the store may be on another disk
            try:
                os.link(temporary, path)  # unlike a rename, keeps one that another store created
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                os.rename(temporary, path)
        finally:  # on a full disk, too
            temporary.unlink(missing_ok=True)


def _open_client(uri: str) -> "MlflowClient":
    from mlflow import MlflowClient

    silence_mlflow()  # importing mlflow resets its loggers
    client = MlflowClient(tracking_uri=uri)
    client.search_experiments(max_results=1)  # creates or upgrades the tables, or fails
    return client


def read_store_id(store: Path) -> str:
    """Return the store's random id, which marks its runs on a server that several stores use.

    Raises:
        TrackingError: something else is in the place of its file.
    """
    path = store / "tracking.id"
    try:
        if not path.exists():
            with hold_mlflow_lock(store):
                if not path.exists():
                    write_atomic(path, uuid.uuid4().hex + "\n")
        store_id = read_regular(path, 100).decode(errors="replace").strip()
        if re.fullmatch("[0-9a-f]{32}", store_id):
            return store_id
        reason = "it holds no id of 32 hex digits, which its runs have as the tag kvlab.store"
    except (OSError, StoreError) as error:
        reason = str(error)
    raise TrackingError(f"{path} cannot be used: {reason}; `kvlab sync --rebuild` makes it anew")


@contextmanager
def translate_errors(uri: str) -> Iterator[None]:
    """Raise TrackingError for errors of MLflow and of the libraries below it."""
    try:
        yield
    except Exception as error:
        # Where its database is damaged, MLflow raises whatever its own code happens to.
        frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
        modules = [*(base.__module__ for base in type(error).__mro__), *frames]
        is_foreign = _MLFLOW_PACKAGES.isdisjoint(module.partition(".")[0] for module in modules)
        if is_foreign and not isinstance(error, OSError | ImportError):
            raise
        reason = re.sub(r"://[^/\s@]*@", "://", " ".join(str(error).split()))  # passwords
        reason = reason if len(reason) <= 300 else f"{reason[:300]}..."
        text = f"MLflow at {redact_url(uri)}: {reason}"
        raise TrackingError(f"{text}; {_hint(uri, error)}") from error


def _hint(uri: str, error: Exception | None = None) -> str:
    if isinstance(error, ImportError):
        return "run pip install mlflow; `kvlab sync` catches up"
    if is_server(uri):
        return "start it or name another with --tracking-uri; `kvlab sync` catches up"
    if uri.startswith("sqlite:"):
        text = "`kvlab sync` catches up; where the database is damaged, or of another version of"
        return f"{text} MLflow, `kvlab sync --rebuild` makes it again from the record"
    return "use sqlite:///PATH, another database, or the http:// address of a server"


def check_port(port: int) -> None:
    """Raise a UsageError if `serve_ui` could not listen at a port."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        text = f"--port = {port} cannot be used ({os.strerror(error.errno or 0)})"
        raise UsageError(f"{text}; name another, such as --port {port % 65000 + 1}") from None


def serve_ui(store: Path, uri: str | None, port: int) -> None:
    """Replace this process by MLflow's server, on the loopback interface.

    Args:
        uri: of the database, see `tracking_uri`.
    """
    silence_mlflow()
    sys.stdout.flush()
    # This variable would override the arguments below.
    environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
    command = server_command(tracking_uri(store, uri), store, port)
    os.execve(sys.executable, command, environment)


def server_command(uri: str, store: Path, port: int) -> list[str]:
    """Return the command that serves a database and the artifacts beside it."""
    root = (store.absolute() / "mlartifacts").as_uri()
    return [
        sys.executable, "-m", "mlflow", "server",
        "--backend-store-uri", uri, "--default-artifact-root", root,
        "--host", HOST, "--port", str(port), "--workers", "1",
    ]  # fmt: skip
