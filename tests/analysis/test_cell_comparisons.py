"""Cells against their references: by numpy and scipy from the losses alone, and their verdicts."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from kvlab.analysis.sequential import t_bounds
from kvlab.analysis.statistics import t_quantile
from kvlab.analysis.study import Study
from tests.analysis.test_estimand import CELLS, make_study

SEEDS = 4
REFERENCES = {cell: ("mha", cell[1], "none") for cell in CELLS}
COMPARED = [cell for cell in CELLS if cell != REFERENCES[cell]]


def with_losses(study, changed):
    """The same study with other losses at every seed."""
    rows = [
        replace(row, measurements={"loss_served": float(changed[row.levels][row.seed])})
        for row in study.rows
    ]
    return Study(study.store, study.sweep, rows)


def noisy_study(seed, **options):
    """A study in which one K/V head costs 0.3 nats, and each tied cell has a noise of its own."""
    study = make_study(seeds=SEEDS, **options)
    random = np.random.default_rng(seed)
    trained = {cell: random.normal(0, 0.02, SEEDS) for cell in CELLS if cell[2] != "tied"}
    together, table = random.normal(0, 0.3, SEEDS), {}
    for cell in CELLS:
        weights = (*cell[:2], "none" if cell[2] == "tied" else cell[2])
        table[cell] = 4 + together + trained[weights] + 0.3 * (cell[0] == "mqa")
        if cell[2] == "tied":
            table[cell] = table[cell] + random.normal(0.1, 0.2, SEEDS)
    return with_losses(study, table)


def expected_errors(values):
    """Own and pooled errors with their degrees of freedom, from their definitions.

    The pooled variance is that of the differences of separately trained cells from the baseline.
    """
    base, others = values[CELLS[0]], [c for c in CELLS[1:] if c[2] != "tied"]
    table = np.array([values[c] for c in (CELLS[0], *others)])
    pooled = np.mean([np.var(values[c] - base, ddof=1) for c in others]) / 2
    residuals = table - table.mean(0) - table.mean(1)[:, None] + table.mean()
    contrasts = np.hstack([-np.ones((len(others), 1)), np.eye(len(others))])
    freedoms = []
    for noise in (np.ones(len(table)), (residuals**2).sum(1)):
        covariance = contrasts @ np.diag(noise) @ contrasts.T
        freedoms.append((SEEDS - 1) * np.trace(covariance) ** 2 / (covariance**2).sum())
    found = {}
    for cell in COMPARED:
        own = np.var(values[cell] - values[REFERENCES[cell]], ddof=1)
        if cell[2] == "tied":
            error, df = math.sqrt(own / SEEDS), SEEDS - 1
        elif 2 * pooled >= own:
            error, df = math.sqrt(2 * pooled / SEEDS), min(freedoms)
        else:
            error, df = math.sqrt(own / SEEDS), math.sqrt(min(freedoms) * (SEEDS - 1))
        found[cell] = error, df
    return found


@pytest.mark.parametrize("seed", range(3))
def test_against_numpy_and_scipy(seed):
    study = noisy_study(seed)
    values = {cell: np.array([*study.values(cell, "loss_served").values()]) for cell in CELLS}
    errors = expected_errors(values)
    means = {c: (values[c] - values[REFERENCES[c]]).mean() for c in COMPARED}
    own = [2 * stats.t.sf(abs(means[c]) / errors[c][0], errors[c][1]) for c in COMPARED]
    corrected = dict(zip(COMPARED, multipletests(own, method="holm")[1], strict=True))
    found = study.comparisons
    assert list(found) == COMPARED
    for cell, comparison in found.items():
        assert comparison.reference == REFERENCES[cell]
        assert comparison.value == pytest.approx(means[cell])
        if comparison.effect is not None:  # judged with the levels, see below
            continue
        error, df = errors[cell]
        assert comparison.estimate.standard_error == pytest.approx(error)
        assert comparison.estimate.df == pytest.approx(df)
        assert comparison.estimate.p == pytest.approx(corrected[cell], rel=1e-6)
        reach = stats.t.isf(0.025 / len(COMPARED), df) * error
        is_found = corrected[cell] <= 0.05
        low, high = means[cell] - reach, means[cell] + reach
        low, high = (max(0, low), high) if is_found and means[cell] > 0 else (low, high)
        low, high = (low, min(0, high)) if is_found and means[cell] < 0 else (low, high)
        assert (comparison.low, comparison.high) == pytest.approx((low, high), abs=1e-12)
        assert (comparison.verdict == "within noise") == (not is_found)
    assert {c[2] for c in COMPARED if found[c].verdict == "worse" and c[0] == "mqa"} >= {"trained"}


def test_one_comparison_has_one_verdict():
    """Where a cell differs from its reference as one level does, it has the level's interval."""
    found = noisy_study(0).comparisons
    ties = {cell: one.effect for cell, one in found.items() if cell[2] == "tied"}
    assert ties["mha", "learned", "tied"].name == "sharing=tied at heads=mha, position=learned"
    for cell, one in found.items():
        if one.effect is not None:
            assert one.effect.weights == {cell: 1.0, REFERENCES[cell]: -1.0}
            assert (one.low, one.high) == (one.effect.low, one.effect.high)
            assert one.verdict == one.effect.verdict
    assert ties["mqa", "rope", "tied"] is None, "tied with one K/V head is two levels"


def test_a_margin_and_a_cost_that_is_shown_all_the_same():
    study = noisy_study(0, decide={"margin": 0.5})
    verdicts = {one.verdict for cell, one in study.comparisons.items() if cell[0] == "mqa"}
    assert "worse, but less than 0.5" in verdicts
    bounded = [one for one in study.comparisons.values() if one.verdict == "costs less than 0.5"]
    assert bounded
    assert all(one.low < 0 < one.high < 0.5 for one in bounded)


def test_sweeps_that_claim_something_else_explored_their_cells():
    narrow = noisy_study(0, decide={"claims": ["heads=mqa"]})
    assert all(one.is_explored for one in narrow.comparisons.values() if one.effect is None)
    assert not any(one.is_explored for one in noisy_study(0).comparisons.values())


def test_a_look_spends_a_part_of_the_error():
    """Four of eight declared seeds: each interval has the bound of that look, and no more."""
    looks = {"first": 0, "looks": [2, 4, 8]}
    declared = {"stages": {"declared": {"looks": {"seeds": looks}}}}
    study, plain = noisy_study(0, **declared), noisy_study(0)
    assert study.declared_looks.looks == (2, 4, 8)
    bound = t_bounds((2, 4), 8, 0.05)[-1]
    level = 2 * stats.t.sf(bound, SEEDS - 1)  # of one test at this look
    assert level < 0.01
    for cell in (("mqa", "rope", "trained"), ("mqa", "rope", "tied")):
        one = plain.comparisons[cell].estimate
        reach = t_quantile(1 - level / len(COMPARED) / 2, one.df) * one.standard_error
        assert study.comparisons[cell].high == pytest.approx(one.value + reach)


def test_cells_that_diverged_are_not_judged():
    study = noisy_study(0)
    lost = {("mqa", "rope", "trained"): 1, ("mha", "rope", "none"): 2}
    rows = [
        replace(row, status="diverged") if lost.get(row.levels) == row.seed else row
        for row in study.rows
    ]
    found = Study(study.store, study.sweep, rows).comparisons
    assert found["mqa", "rope", "trained"].verdict_name == "diverged"
    assert not found["mqa", "rope", "trained"].has_interval
    assert found["mqa", "rope", "none"].verdict_name == "baseline diverged"
    assert found["mqa", "learned", "trained"].verdict_name == "worse"
