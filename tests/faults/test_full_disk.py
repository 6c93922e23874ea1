"""A disk that is really full: a tmpfs of a few pages under a real sweep."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]


def can_mount() -> bool:
    """Return whether this process may have a mount namespace; in containers it may not."""
    probe = [*OWN_MOUNTS, "sh", "-c", "mount -t tmpfs none /mnt"]
    return (
        bool(shutil.which("unshare")) and not subprocess.run(probe, capture_output=True).returncode
    )


pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not can_mount(), reason="no mount namespaces here"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    ended = subprocess.run(
        [*OWN_MOUNTS, sys.executable, "-m", "tests.faults.full_disk", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_the_message_names_the_file_the_reason_and_a_fix(found):
    full = [*found["checkpoint"][:-1], *found["record"][:-1]]
    assert [one["code"] for one in full] == [1] * 7
    for one in full:
        last = one["error"].splitlines()[-1]
        assert "/disk/runs" in last
        assert "No space left on device" in last
        assert last.endswith(("run again", "submit again", "and the disk"))
        assert "Traceback" not in one["error"]
    assert "/checkpoints/" in found["checkpoint"][2]["error"].splitlines()[-1]
    assert "/checkpoints/" in found["checkpoint"][3]["error"].splitlines()[-1]
    assert "result.json" in found["record"][2]["error"].splitlines()[-1]


def test_a_full_disk_damages_nothing_and_with_room_the_numbers_and_weights_are_the_same(found):
    assert [one["states"] for one in found["checkpoint"]] == [[], [None], [None], [None], ["done"]]
    assert found["leftovers"] == []
    for one in found["record"][:-1]:
        assert sorted(one["states"], key=str) == [None, "done"]
    ends = [found["calm"], found["checkpoint"][-1], found["record"][-1]]
    assert [one["code"] for one in ends] == [0, 0, 0]
    assert len(found["numbers"]["calm"]) == 2
    assert found["numbers"]["full"] == found["numbers"]["calm"]
    assert found["weights"]["full"] == found["weights"]["calm"]
