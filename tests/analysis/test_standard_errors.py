"""Pooled errors in small null sweeps, and who keeps an error of its own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvlab.analysis.standard_errors import measure_seed_effect, pool_variance
from tests.studies import null_sweeps as study
from tests.studies.null_sweeps import THREE, Structure, list_structures, simulate

MOST = {
    "noisy baseline, seeds explain nothing": Structure(
        study.ONE_OF_18, 3, study.noisy_baseline, common=0
    ),
    "levels that vary with the seed": Structure(THREE, 3, study.level_by_seed),
    "at the margin": Structure(THREE, 3, effects=(2.0, 2.0, 0.0, 0.0), margin=2.0),
    "trials missing": list_structures()["4 levels, noisy cell, trials missing, 3 seeds"],
    "half of a level diverges": Structure(THREE, 5, diverges="level"),
}


@pytest.mark.parametrize("structure", MOST.values(), ids=MOST)
def test_sweeps_say_something_false_5_percent_of_the_time_at_most(structure):
    """A small version of `python -m tests.studies null_sweeps`."""
    sweeps = 120
    _, report, coverage = study.measure(structure, sweeps, 0)
    most = 0.05 + 2 * (0.05 * 0.95 / sweeps) ** 0.5
    assert report <= most
    assert coverage >= 1 - most


def test_pooling_finds_more():
    own, report = study.measure_power(Structure(THREE, 3), 100, 0)
    assert report > own + 0.15


def test_seeds_that_differ_between_levels_are_pooled():
    structure = list_structures()["5 levels, trials missing, 5 seeds"]
    found = []
    for effects in simulate(structure, 20, np.random.default_rng(1)):
        assert {len(effect.seeds) for effect in effects} == {2, 5}
        pooled = [effect for effect in effects if effect.tested_error.is_pooled]
        degrees = {len(effect.seeds): effect.tested_error.df for effect in pooled}
        if len(degrees) == 2:
            found.append(degrees)
    assert found
    for degrees in found:
        assert degrees[2] == pytest.approx(max(1.0, degrees[5] / 4))


# What equal seeds explain, and errors where they explain nothing


def table(cells: int, seeds: int, *, common: float, number: int) -> np.ndarray:
    """Return normal values of cells by seeds, with a part that all cells have in common."""
    random = np.random.default_rng(number)
    return random.normal(size=(cells, seeds)) + common * random.normal(size=seeds)


def by_seed(values: np.ndarray) -> dict[int, dict[int, float]]:
    return {n: dict(enumerate(row)) for n, row in enumerate(values.tolist())}


@given(
    cells=st.integers(2, 8), seeds=st.integers(3, 6), lost=st.booleans(), number=st.integers(0, 99)
)
@settings(max_examples=50)
def test_the_f_test_is_that_of_least_squares(cells, seeds, lost, number):
    """Of a table of cells and seeds, in which a training may be missing."""
    values = table(cells, seeds, common=0.5, number=number)
    rows = by_seed(values)
    if lost and cells > 2:  # what is left of a seed is compared with something
        del rows[1][2]
    found = measure_seed_effect(list(rows.values()))
    there = [(c, s, v) for c, row in rows.items() for s, v in row.items()]
    response = np.array([v for _, _, v in there])

    def left_over(with_seeds: bool) -> tuple[float, int]:
        of_cells = np.array([[float(c == one) for one in range(cells)] for c, _, _ in there])
        of_seeds = np.array([[float(s == one) for one in range(1, seeds)] for _, s, _ in there])
        design = np.hstack([of_cells, of_seeds]) if with_seeds else of_cells
        fitted = design @ np.linalg.lstsq(design, response, rcond=None)[0]
        return float(((response - fitted) ** 2).sum()), len(there) - design.shape[1]

    (small, small_df), (large, large_df) = left_over(True), left_over(False)
    value = (large - small) / (large_df - small_df) / (small / small_df)
    assert found is not None
    expected = stats.f.sf(value, large_df - small_df, small_df)
    assert found.p == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert found.spread_ratio == pytest.approx(np.sqrt(small / small_df / (large / large_df)))


@pytest.mark.parametrize("rows", [{}, {0: {1: 1.0, 2: 3.0}}, {0: {1: 1.0}, 1: {1: 2.0}}])
def test_too_few_trainings_say_nothing(rows):
    assert measure_seed_effect(list(rows.values())) is None


TWO = [{1: 1.0, 0: -1.0}, {2: 1.0, 0: -1.0}]


@pytest.mark.parametrize("weights", [TWO, [{3: 0.5, 2: 0.5, 1: -0.5, 0: -0.5}, *TWO]])
def test_few_differences_and_means_over_settings_keep_their_pairs(weights):
    values = table(4, 5, common=0, number=2)
    assert not measure_seed_effect(list(by_seed(values).values())).is_found
    differences = [
        dict(enumerate(sum(weight * values[n] for n, weight in one.items()).tolist()))
        for one in weights
    ]
    assert pool_variance(differences, weights, by_seed(values)).is_paired
