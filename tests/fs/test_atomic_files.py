"""Files that are written whole or not at all."""

import math
import os
import subprocess
import sys

import pytest

from kvlab.errors import StoreError
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.fs.lock import Lock

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
