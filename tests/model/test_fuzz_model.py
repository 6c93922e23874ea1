"""Cached logits equal the dense reference's for random layouts, chunks, rows and tie rules."""

import pytest

from kvlab.model.kernels import use_plain_code
from tests.fuzz_model import TOLERANCE, draw_case, run_case

CASES, PLAIN_CASES, PARTS = 400, 100, 4
MORE_CASES = 3_000


def check_cases(first, last, step=1):
    for number in range(first, last, step):
        case = draw_case(number)
        assert run_case(case) <= TOLERANCE[case.dtype], case


@pytest.mark.parametrize("part", range(PARTS))
def test_every_logit_agrees_with_the_reference(part):
    check_cases(part, CASES, PARTS)


def test_every_logit_agrees_without_the_cpu_kernels():
    with use_plain_code():
        check_cases(0, PLAIN_CASES)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_every_logit_of_many_more_cases_agrees(code_path):  # noqa: ARG001
    check_cases(CASES, MORE_CASES)
