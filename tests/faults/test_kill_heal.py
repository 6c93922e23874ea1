"""A few random kills while `kvlab verify --heal` races a submit and files are damaged.

For more: ``python -m tests.faults.kill_heal --kills 100 --seed 0``.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KILL_HEAL = [sys.executable, "-m", "tests.faults.kill_heal", "--seed", "0"]
TIMEOUT_SECONDS = 280.0


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans a new parent")
def test_kills_and_damage_while_the_record_is_healed_leave_it_as_undisturbed():
    done = subprocess.run(
        [*KILL_HEAL, "--kills", "16"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 kills {" in done.stdout
    assert "all numbers and weights as undisturbed" in done.stdout
