"""Mutated specs; `python -m tests.studies fuzz_specs` runs any number."""

import re

import pytest

from tests.studies.fuzz_specs import (
    Workspace,
    check_case,
    find_problems,
    make_files,
    search_problems,
)


def test_mutated_specs_are_recorded_or_refused():
    assert find_problems(range(100)) == {}


@pytest.mark.faults
def test_many_more_mutated_specs():
    assert search_problems(100, 1_000) == {}


def test_a_file_outside_the_store_is_noticed(tmp_path):
    with Workspace(tmp_path).entered() as workspace:
        (workspace.store / "trials").mkdir(parents=True)
        assert workspace.find_strays(store=True) == []
        store = workspace.store
        assert workspace.find_strays(store=False) == [str(store), str(store / "trials")]
        for name in ("home/.kvlab", "work/mlruns", "specs/s.yaml.tmp", "runs-2"):
            (workspace.root / name).touch()
            assert workspace.find_strays(store=True) == [str(workspace.root / name)]
            (workspace.root / name).unlink()


def test_an_error_message_without_a_place_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.studies.fuzz_specs.ERROR_LINE", re.compile("nowhere"))
    with Workspace(tmp_path).entered() as workspace:
        problems = [check_case(number, workspace) for number in range(5)]
    assert any(text and text.startswith("no place in") for text in problems)


def test_a_case_follows_from_its_number_and_cases_differ():
    assert make_files(7) == make_files(7)
    assert len({make_files(number)["s.yaml"] for number in range(50)}) > 25
