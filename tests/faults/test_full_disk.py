"""A disk that is really full: a tmpfs of a few pages under a real sweep."""

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


@pytest.mark.faults
@pytest.mark.skipif(not can_mount(), reason="no mount namespaces here")
def test_a_full_disk_damages_nothing_says_so_and_with_room_all_is_the_same(tmp_path):
    command = [*OWN_MOUNTS, sys.executable, "-m", "tests.faults.full_disk", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
