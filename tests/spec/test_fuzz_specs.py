"""Mutated specs; `python -m tests.studies fuzz_specs` runs any number."""

import re

import pytest

from tests.studies.fuzz_specs import Workspace, check_case, find_problems, search_problems


def test_mutated_specs_are_recorded_or_refused():
    assert find_problems(range(60)) == {}


@pytest.mark.faults
def test_many_more_mutated_specs():
    assert search_problems(100, 1_000) == {}


def test_what_should_not_happen_is_noticed(tmp_path, monkeypatch):
    """A file outside the store, and an error message without a place."""
    monkeypatch.setattr("tests.studies.fuzz_specs.ERROR_LINE", re.compile("nowhere"))
    with Workspace(tmp_path).entered() as workspace:
        problems = [check_case(number, workspace) for number in range(3)]
        assert any(text and text.startswith("no place in") for text in problems)
        assert workspace.find_strays(store=True) == []
        (workspace.root / "work/mlruns").touch()
        assert workspace.find_strays(store=True) == [str(workspace.root / "work/mlruns")]
