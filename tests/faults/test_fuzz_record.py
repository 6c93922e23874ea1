"""Damaged records; `python -m tests.studies fuzz_record` runs any number of cases."""

import pytest

from tests.studies.fuzz_record import run_cases

CASES = 120


@pytest.mark.faults
def test_no_damage_of_the_record_is_a_traceback_or_a_hang():
    assert run_cases(0, CASES) == []
