"""A few cases of the studies that kill processes and damage files at random; they try more."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_SECONDS = 800.0


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans a new parent")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["chaos", "--kills", "3", "--seeds", "1", "--steps", "150", "--where", "two nodes"],
            " 3 kills {",
        ),
        (["kill_heal", "--kills", "8"], "all numbers and weights as undisturbed"),
        (["fuzz_record", "--cases", "40"], "40 cases, 0 failed"),
    ],
)
def test_a_few_kills_and_damages_lose_nothing(words, said):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.studies", *words],
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
