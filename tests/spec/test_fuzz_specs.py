"""Mutated specs; `python -m tests.studies fuzz_specs` runs any number."""

import pytest

from tests.studies.fuzz_specs import find_problems, search_problems


def test_mutated_specs_are_recorded_or_refused():
    assert find_problems(range(60)) == {}


@pytest.mark.faults
def test_many_more_mutated_specs():
    assert search_problems(100, 1_000) == {}
