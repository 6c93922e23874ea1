"""Files that are written whole or not at all."""

import errno
import math
import os
import runpy
import subprocess
import sys

import pytest

from kvlab.errors import RecordDamaged, StoreError
from kvlab.fs import atomic_files
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.fs.lock import Lock
from kvlab.fs.sealed_files import read_sealed_json

FULL = """
import resource, signal, sys
from kvlab.errors import StoreError
from kvlab.fs.atomic_files import write_atomic
from kvlab.fs.lock import Lock
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
for write in (lambda path: write_atomic(path, b"x" * 5000), lambda path: Lock(path).acquire()):
    try:
        write(sys.argv[1])
    except StoreError as error:
        print(error)
"""


def test_a_full_disk_leaves_only_the_old_file_and_no_part_of_a_lease(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True)
    file, lease = done.stdout.splitlines()
    assert file.startswith(f"{path} cannot be written")
    assert lease.startswith(f"{path}.1 cannot be locked: ")
    assert (os.listdir(tmp_path), path.read_text()) == (["file"], "old")
    assert Lock(path).acquire(timeout=0.0)


def test_json_comes_back_and_other_files_and_nan_are_refused(tmp_path):
    write_json(tmp_path / "deep" / "x.json", {"a": [1, 2.5, None, "é"]})
    assert read_json(tmp_path / "deep" / "x.json") == {"a": [1, 2.5, None, "é"]}
    with pytest.raises(ValueError, match="[Oo]ut of range"):
        write_json(tmp_path / "y.json", {"a": math.nan})
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "y.json")
    (tmp_path / "y.json").write_text('{"a": 1')
    with pytest.raises(StoreError, match=r"y\.json cannot be read"):
        read_json(tmp_path / "y.json")


def test_a_file_system_without_hard_links_is_enough_on_macos_too(tmp_path, monkeypatch):
    """ENOTSUP is a number of its own there; on Linux it is EOPNOTSUPP."""

    def link(*_):
        raise OSError(45, "Operation not supported")

    monkeypatch.setattr(errno, "ENOTSUP", 45)
    monkeypatch.setattr(os, "link", link)
    write_atomic = runpy.run_path(atomic_files.__file__)["write_atomic"]
    write_atomic(tmp_path / "result.json", "first", once=True)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "result.json", "second", once=True)
    assert (tmp_path / "result.json").read_text() == "first"
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.mark.parametrize("code", [errno.ENXIO, errno.EOPNOTSUPP])  # Linux's, macOS's
def test_a_socket_in_the_place_of_a_record_is_damage(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RecordDamaged):
        read_sealed_json(tmp_path / "result.json")
