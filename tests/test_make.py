"""`make setup` with a Python that only pretends: it says what it is doing, and fails as pip does."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parent.parent / "Makefile"
PIP = """\
#!/bin/sh
echo "Collecting torch"
echo "  Downloading torch-2.11.0-cp311.whl.metadata (29 kB)"
echo "Downloading torch-2.11.0-cp311.whl (915.7 MB)"
echo "Installing collected packages: torch, kvlab"
exit CODE
"""


@pytest.mark.parametrize("code", [0, 1])
def test_setting_up_says_what_it_does(tmp_path, code):
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (tmp_path / "pip").write_text(PIP.replace("CODE", str(code)))
    (tmp_path / "python").write_text("#!/bin/sh\nmkdir -p .venv/bin && cp pip .venv/bin/python\n")
    for name in ("pip", "python"):
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "setup", "PYTHON=./python", ".SHELLFLAGS=-c"],  # make 3.81 does not know these
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[1:3] == [
        "Downloading torch-2.11.0-cp311.whl (915.7 MB)", "Installing collected packages",
    ]  # fmt: skip
    assert bool(done.returncode) == bool(code)
    marks = {path.name for path in (tmp_path / ".venv").iterdir()} - {"bin"}
    assert marks == (set() if code else {".ready", ".dev"})
