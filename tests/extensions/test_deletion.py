"""Each folder of kvlab/extensions can be deleted: what is left is whole, and says what is missing."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.own_extensions import TABLE
from tests.support.extensions import find_missing
from tests.support.shipped_ids import list_trials

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole():
    return list_trials(ROOT)


def list_without(folder: Path, names, *options) -> dict:
    """Return what `tests.support.shipped_ids` finds in a copy without some extensions."""
    for part in ("kvlab", "experiments", "sweeps", "docs/extend"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in names:
        shutil.rmtree(folder / "kvlab" / "extensions" / name)
    (folder / "tests" / "support").mkdir(parents=True)
    for part in ("__init__.py", "support/__init__.py", "support/shipped_ids.py"):
        if (ROOT / "tests" / part).exists():
            shutil.copy(ROOT / "tests" / part, folder / "tests" / part)
    command = [sys.executable, "-m", "tests.support.shipped_ids", str(folder), *options]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict = json.loads(done.stdout)
    return found


def run_in(folder: Path, *arguments) -> subprocess.CompletedProcess:
    """Run a command of the kvlab in a folder."""
    command = [sys.executable, "-m", "kvlab", *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def check_trials(whole, left, names):
    """Compare with the trials of the whole tree; return the sweeps that are refused."""
    refused = set()
    for sweep, trials in left.items():
        if isinstance(trials, list):
            assert trials == whole[sweep], f"{sweep} has other trials"
        elif isinstance(whole[sweep], list):
            refused.add(sweep)
            assert any(f"needs kvlab/extensions/{name}, which is" in trials for name in names), (
                trials
            )
    return refused


def test_nothing_is_skipped_for_want_of_an_extension():
    assert find_missing("all") == set()


def test_without_any_extension_the_core_imports_and_plans_the_rest(tmp_path, whole):
    found = list_without(tmp_path, TABLE, "--imports")
    assert found["broken"] == []
    refused = check_trials(whole, found["trials"], TABLE)
    assert "recall.yaml" in refused
    assert "quickstart.yaml" not in refused


def test_without_some_the_others_are_whole_and_what_is_missing_is_named(tmp_path, whole):
    """`python -m tests.studies deletion` does so for each, and runs the core's tests."""
    found = list_without(tmp_path, ["recall", "conversations"])
    refused = check_trials(whole, found["trials"], ["recall", "conversations"])
    assert refused >= {name for name in whole if "recall" in name}
    assert {"recall.yaml", "recall-mixed.yaml"} <= refused
    here, left = ({*re.findall(r"--[a-z-]+", run_in(folder, "bench", "--help").stdout)}
                  for folder in (ROOT, tmp_path))  # fmt: skip
    option = min(here - left)
    done = run_in(tmp_path, "bench", "gpt2", option)
    assert done.returncode == 2
    assert f"{option} needs kvlab/extensions/conversations, which is" in done.stderr
