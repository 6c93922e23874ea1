"""Completion: what may stand for a word, and what a real shell makes of it."""

import shutil
import subprocess
import sys

import pytest

from kvlab.cli.commands import COMMANDS
from kvlab.cli.commands.completion import NAMES, SCRIPTS, list_candidates
from kvlab.cli.main import main

TRIALS = ("51c0ffee00000000", "51dddddd00000000", "a000000000000000")


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """Stand in a folder below a project with two sweep files, a submitted sweep and trials."""
    monkeypatch.delenv("KVLAB_STORE", raising=False)
    for folder in ("sweeps", "experiments", "notes", "runs/sweeps/heads", "other/trials/beef"):
        (tmp_path / folder).mkdir(parents=True)
    for trial in TRIALS:
        (tmp_path / "runs/trials" / trial).mkdir(parents=True)
    for name in ("heads", "horizon"):
        (tmp_path / "sweeps" / f"{name}.yaml").touch()
    monkeypatch.chdir(tmp_path / "notes")


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("s", ["schema", "status", "stop", "submit", "sync"]),
        ("plan ", ["heads", "horizon"]),
        ("submit ho", ["horizon"]),
        ("status ", ["heads"]),
        ("logs ", [*TRIALS, "heads"]),
        ("generate 51", [*TRIALS[:2]]),
        ("generate --store ../other ", ["beef"]),
        ("generate --prompt 51", []),
        ("submit --ex", ["--executor"]),
        ("submit --executor i", ["inline"]),
        ("submit --no-report h", ["heads", "horizon"]),
        ("schema s", ["sweep"]),
        ("nosuch ", []),
    ],
)
def test_candidates(line, candidates):
    assert list_candidates(line.split(" ")) == candidates


def test_names_are_of_commands_and_need_no_spec():
    assert set(NAMES) <= set(COMMANDS)
    code = (
        "import sys; from kvlab.cli.main import main\n"
        "main(['completion', 'candidates', 'submit', 'he'])\n"
        "print({'pydantic', 'yaml', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["heads", "set()"]


def test_bash_completes(capsys, tmp_path):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "kvlab").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvlab "$@"\n')
    (tmp_path / "kvlab").chmod(0o755)
    typed = f"PATH={tmp_path}:$PATH; COMP_WORDS=(kvlab plan ho); COMP_CWORD=2; _kvlab"
    command = f"{script}{typed}; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "horizon\n"


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_the_scripts_are_valid(shell, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    main(["completion", shell])
    script = capsys.readouterr().out
    assert subprocess.run([shell, "-n"], input=script, text=True).returncode == 0
