"""The family error and the coverage of sweeps with looks, in small; see tests/studies/null_looks.py."""

import pytest

from tests.studies.null_looks import STRUCTURES, simulate

SWEEPS = 300
SLACK = 3 * (0.05 * 0.95 / SWEEPS) ** 0.5
"""Three Monte Carlo errors."""


@pytest.mark.parametrize("name", ["5 nulls", "4 at the margin, 1 null"])
def test_a_sweep_with_looks_keeps_its_error(name):
    tally = simulate(STRUCTURES[name], SWEEPS)
    assert tally.error <= 0.05 + SLACK
    assert tally.coverage >= 0.95 - SLACK
    assert tally.seeds < 0.95


def test_looks_find_nearly_what_the_most_seeds_find_with_fewer():
    tally = simulate(STRUCTURES["5 of 3"], 50)
    assert tally.power > 0.98
    assert tally.seeds < 0.8
