"""Cached logits equal the dense reference's for random layouts, chunks, rows and tie rules."""

import pytest

from kvlab.model.kernels import use_plain_code
from tests.fuzz_model import TOLERANCE, draw_case, run_case

CASES, PLAIN_CASES, PARTS = 2_000, 500, 16


@pytest.mark.parametrize("part", range(PARTS))
def test_every_logit_agrees_with_the_reference(part):
    for number in range(part, CASES, PARTS):
        case = draw_case(number)
        assert run_case(case) <= TOLERANCE[case.dtype], case


@pytest.mark.parametrize("part", range(4))
def test_every_logit_agrees_without_the_cpu_kernels(part):
    with use_plain_code():
        for number in range(part, PLAIN_CASES, 4):
            case = draw_case(number)
            assert run_case(case) <= TOLERANCE[case.dtype], case
