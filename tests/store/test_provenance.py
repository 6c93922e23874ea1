"""Where a run came from: the commit of our code alone, and no folder of this machine."""

import os
import platform
import subprocess

import pytest

from kvlab.store.provenance import (
    Machine,
    Origin,
    build_provenance,
    read_git_state,
    redact_paths,
)


def git(folder, *arguments):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_code_has_the_commit_of_a_checkout_that_tracks_it_and_whether_it_was_changed(tmp_path):
    checkout = tmp_path / "work"
    package, installed = checkout / "package", checkout / ".venv" / "package"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    git(checkout, "init", "-q")
    git(checkout, "add", "package")
    git(checkout, "commit", "-q", "-m", "first")
    commit = git(checkout, "rev-parse", "HEAD")
    assert read_git_state(package) == (commit, False)
    (checkout / "notes").write_text("not tracked")
    assert read_git_state(package) == (commit, False)
    (package / "__init__.py").write_text("changed")
    assert read_git_state(package) == (commit, True)
    assert read_git_state(installed) == read_git_state(tmp_path) == (None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/me/data/x.txt is gone", "~/data/x.txt is gone"),
        ("/home/other/data/x.txt is gone", "x.txt is gone"),
        ("'/scratch/me/x', \"/srv/y/z.py\" (/a/b/c): /d/e", "'x', \"z.py\" (c): e"),
        ("see https://example.org/a/b and tokens/s, 3 / 4, and/or /x", None),
        ("model.n_kv_head = 5; ~/data/a/b; ../a/b; ./a/b", None),
    ],
)
def test_texts_lose_folders_and_nothing_else(text, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert redact_paths(text) == (text if expected is None else expected)


def test_provenance_names_versions_and_kinds_but_no_machine_and_nobody():
    of = {"started": "2026-01-01T00:00:00Z", "attempts": 2, "machine": Machine("cpu", 1)}
    facts = build_provenance(Origin(), **of)
    assert facts["versions"].keys() >= {"torch", "numpy", "ray", "pydantic"}
    assert facts["python"] == platform.python_version()
    assert (facts["device"], facts["threads"], facts["attempts"]) == ("cpu", 1, 2)
    for name in (platform.node(), os.path.expanduser("~")):
        assert len(name) < 2 or name not in str(facts)
