"""Whether kvlab is complete without one of its extensions: its checks and tests in a copy.

python -m tests.studies deletion NAME [ARGUMENTS OF PYTEST]
python -m tests.studies deletion each [NAME ...]

The copy has neither kvlab/extensions/NAME nor tests/extensions/NAME, nor the tests of several
extensions together, which are files of tests/extensions itself. ``all`` deletes every extension. In
the copy every module must import, and each shipped sweep that does not name NAME has the trials that
it has here. Then the type checker, the import contracts, the checks of YAML and pages and all tests
run: as long as the tests here. Arguments of pytest, such as files, select some of them.

``each`` takes every extension in turn, or those named. Without it, modules and trials are compared.
Then all others are deleted, and its own tests run. Beside ``all`` it shows that no core test needs
an extension, and that no extension's test needs another one without saying so.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from kvlab.own_extensions import TABLE
from tests.extensions.test_deletion import check_trials, list_without
from tests.support.shipped_ids import list_trials

ROOT = Path(__file__).parents[2]
PYTEST = (
    "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal", "-rfE", "--tb=short",
)  # fmt: skip
CHECKS = (("mypy", "kvlab"), ("lint-imports",), ("python", "-m", "tests.checks"))
SCHEMAS = [("kvlab", "schema", kind) for kind in ("experiment", "sweep")]


def copy_without(folder: Path, names: list[str]) -> None:
    """Copy what git knows of this project, without some extensions, as a repository of its own."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split("\0")
    extensions = Path("tests/extensions")
    deleted = {Path("kvlab/extensions") / name for name in names}
    deleted |= {extensions / name for name in names}
    for path in map(Path, filter(None, listed)):
        together = path.parent == extensions and path.name not in ("__init__.py", "conftest.py")
        if not together and not deleted.intersection(path.parents) and (ROOT / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True)


def compare_without(names: list[str]) -> int:
    """Delete some, and print what is refused; return how many modules cannot be imported."""
    with TemporaryDirectory() as place:
        found = list_without(Path(place) / "copy", names, "--imports")
    refused = check_trials(list_trials(ROOT), found["trials"], names)
    print("refused:", ", ".join(sorted(refused)) or "no shipped sweep")
    print("cannot be imported:", ", ".join(found["broken"]) or "no module", flush=True)
    return len(found["broken"])


def run_without(names: list[str], commands: Iterable[Sequence[str]]) -> int:
    """Run commands in a copy of the project without some extensions; return how many failed."""
    with TemporaryDirectory() as place:
        folder = Path(place) / "project"
        copy_without(folder, names)
        environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}

        def run(tool: str, *arguments: str, **options: object) -> int:
            command = [str(Path(sys.executable).parent / tool), *arguments]
            print("==", tool, *arguments, flush=True)
            return subprocess.run(command, cwd=folder, env=environment, **options).returncode

        for command in SCHEMAS if "reference" not in names else ():  # which say what is there
            with (folder / f"{command[-1]}s" / f"{command[-1]}.schema.json").open("w") as schema:
                run(*command, stdout=schema)
        return len([command for command in commands if run(*command)])


def main() -> int:
    """Run the commands; return how many failed."""
    name, *arguments = sys.argv[1:]
    if name != "each":
        names = [*TABLE] if name == "all" else [name]
        return compare_without(names) + run_without(names, (*CHECKS, (*PYTEST, *arguments)))
    failed = 0
    for kept in arguments or TABLE:
        print("====", kept, flush=True)
        tests = f"tests/extensions/{kept}", "tests/cli/test_golden_errors.py"
        others = [other for other in TABLE if other != kept]
        failed += compare_without([kept]) + run_without(others, [(*PYTEST, *tests)])
    return failed
