"""Damaged records; `python -m tests.fuzz_record` runs any number of cases."""

import pytest

from tests.fuzz_record import check_case, make_store

CASES = 300


@pytest.mark.faults
def test_no_damage_of_the_record_is_a_traceback_or_a_hang(tmp_path):
    template = tmp_path / "template"
    template.mkdir()
    make_store(template)
    problems = [check_case(number, template, tmp_path / str(number)) for number in range(CASES)]
    assert [problem for problem in problems if problem is not None] == []
