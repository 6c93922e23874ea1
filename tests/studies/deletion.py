"""Whether kvlab is complete without one of its extensions: its checks and tests in a copy.

python -m tests.studies deletion NAME

The copy has neither kvlab/extensions/NAME nor tests/extensions/NAME. In it every module must import,
and each shipped sweep that does not name NAME has the trials that it has here. Then the type
checker, the import contracts and all tests of the core run. ``all`` deletes every extension.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from kvlab.own_extensions import TABLE
from tests.extensions.test_deletion import check_trials, list_without
from tests.support.shipped_ids import list_trials

ROOT = Path(__file__).parents[2]
COMMANDS = (
    ("mypy", "kvlab"),
    ("lint-imports",),
    ("pytest", "-q", "-p", "no:cacheprovider", "--ignore=tests/extensions", "-n", "auto"),
)


def main() -> int:
    """Run the commands; return how many failed."""
    names = [*TABLE] if sys.argv[1] == "all" else [sys.argv[1]]
    with TemporaryDirectory() as place:
        found = list_without(Path(place) / "copy", names, "--imports")
        refused = check_trials(list_trials(ROOT), found["trials"], names)
        print("refused:", ", ".join(sorted(refused)) or "no shipped sweep")
        print("cannot be imported:", ", ".join(found["broken"]) or "no module")
        folder = Path(place) / "project"
        ignored = shutil.ignore_patterns(".*", "runs", "build", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=ignored, symlinks=True)
        for name in names:
            shutil.rmtree(folder / "kvlab" / "extensions" / name)
            shutil.rmtree(folder / "tests" / "extensions" / name, ignore_errors=True)
        environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        failed = len(found["broken"])
        for tool, *arguments in COMMANDS:
            command = [str(Path(sys.executable).parent / tool), *arguments]
            print("==", tool, *arguments, flush=True)
            failed += (
                subprocess.run(command, cwd=folder, env=environment, check=False).returncode > 0
            )
        return failed


if __name__ == "__main__":
    sys.exit(main())
