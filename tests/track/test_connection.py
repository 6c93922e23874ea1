"""The database that MLflow is given: there whole, or not there."""

import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvlab.errors import TrackingError
from kvlab.track import Tracker
from tests.support.record_factory import Record

ROOT = Path(__file__).parent.parent.parent
MAKE = "import sys; from kvlab.track import Tracker; Tracker(sys.argv[1])"


def tables(path):
    with sqlite3.connect(path) as database:
        return {name for (name,) in database.execute("select name from sqlite_master")}


def test_a_kill_while_the_database_is_made_leaves_none(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", MAKE, tmp_path], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not any(database.stat().st_size for database in tmp_path.glob(".mlflow-*/mlflow.db")):
        assert process.poll() is None, "it was made before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert not (tmp_path / "mlflow.db").exists()
    Tracker(tmp_path)
    assert {"runs", "metrics", "alembic_version"} <= tables(tmp_path / "mlflow.db")
    others = {path.name for path in tmp_path.iterdir() if not path.name.startswith("mlflow.lock")}
    assert others == {"mlflow.db", "tracking.id"}


def test_a_database_elsewhere_is_made_there(tmp_path):
    (tmp_path / "other").mkdir()
    Tracker(tmp_path / "store", f"sqlite:///{tmp_path}/other/mine.db")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["mine.db"]
    with pytest.raises(TrackingError, match="nosuch"):
        Tracker(tmp_path / "store", f"sqlite:///{tmp_path}/nosuch/mine.db")


def test_a_database_of_another_version_is_named_with_the_way_out(tmp_path, mlflow_template):
    path = tmp_path / "mlflow.db"
    shutil.copyfile(mlflow_template(), path)
    with sqlite3.connect(path) as database:
        database.execute("update alembic_version set version_num = '451aebb31d03'")
    expected = rf"\(schema 451aebb31d03, .* `mlflow db upgrade sqlite:///{path}` .* delete it"
    with pytest.raises(TrackingError, match=expected):
        Tracker(tmp_path)


def test_a_database_that_cannot_be_written_is_said_so(tmp_path, mlflow_template, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MLflow makes a folder of such an address
    Record(factors={"heads": ("mha",)}, seeds=(0,)).write(tmp_path)
    shutil.copyfile(mlflow_template(), tmp_path / "other.db")
    tracker = Tracker(tmp_path, f"sqlite:///file:{tmp_path}/other.db?mode=ro&uri=true")
    with pytest.raises(TrackingError, match="it cannot be written; check its permissions"):
        tracker.mirror("made")
