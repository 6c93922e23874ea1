"""A few random kills of the studies that kill processes at random; the studies do more.

``python -m tests.studies chaos`` kills under sweeps on clusters, ``kill_heal`` while files are
damaged and `kvlab verify --heal` races a submit.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_SECONDS = 280.0


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans a new parent")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["chaos", "--kills", "3", "--seeds", "1", "--steps", "150", "--where", "two nodes"],
            " 3 kills {",
        ),
        (["kill_heal", "--kills", "8"], "all numbers and weights as undisturbed"),
    ],
)
def test_a_few_kills_lose_nothing(words, said):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.studies", *words, "--seed", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()  # ends what it started
            process.communicate(timeout=15)
    assert process.returncode == 0, output
    assert said in output
