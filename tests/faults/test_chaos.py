"""A few random kills under a real sweep on a Ray cluster of two nodes.

For more, also on `submit`'s own cluster: ``python -m tests.faults.chaos --kills 100 --seed 0``.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CHAOS = [sys.executable, "-m", "tests.faults.chaos", "--seed", "0"]
TIMEOUT_SECONDS = 280.0


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans a new parent")
def test_six_kills_lose_nothing():
    process = subprocess.Popen(
        [*CHAOS, "--kills", "6", "--seeds", "1", "--steps", "250", "--where", "two nodes"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()  # ends what it started
            process.communicate(timeout=15)
    assert process.returncode == 0, said
    assert " 6 kills {" in said
