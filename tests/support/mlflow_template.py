"""An empty MLflow database that is made once a session, and copied where a test needs a new one.

MLflow runs some fifty migrations to make one, which takes seconds.
"""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from kvlab.track import connection


@contextmanager
def copy_new_databases(folder: Path) -> Iterator[Callable[[], Path]]:
    """Copy a database from ``folder`` wherever this process opens a SQLite file that is missing.

    Yields:
        Makes the database if no process did, and returns its path.
    """
    open_client = connection._open_client

    @cache
    def make_template() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        finished = folder / "mlflow.db"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not finished.exists():
                unfinished = folder / "unfinished.db"
                unfinished.unlink(missing_ok=True)
                open_client(f"sqlite:///{unfinished}")
                unfinished.rename(finished)
        return finished

    def open_copy(uri: str) -> object:
        path = Path(uri.removeprefix("sqlite:///"))
        if uri.startswith("sqlite:///") and "?" not in uri and not path.exists():
            shutil.copyfile(make_template(), path)
        return open_client(uri)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "_open_client", open_copy)
        yield make_template
