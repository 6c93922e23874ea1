"""The numbers of Triton's kernels, where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("test_triton_kernels.py")


@pytest.mark.cuda_code
def test_the_kernels_compute_what_plain_code_does():
    """The interpreter replaces Triton as it is imported, so it needs a process of its own."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", TESTS]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
