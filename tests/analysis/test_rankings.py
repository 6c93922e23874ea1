"""Rankings: unequal seeds, comparisons with one cell and with the best, by hand and by simulation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from kvlab.analysis.rankings import Ranking
from kvlab.analysis.standard_errors import Family, pool_variance
from tests.analysis.null_rankings import simulate_rankings

SERVING_GAP = {
    "plain": (4.7374881, 4.6134603, 4.5663203, 4.5998475, 4.491521),
    "tied-overwrite": (4.7828609, 4.6454806, 4.5904983, 4.6265009, 4.511644),
    "tied-owner": (4.7505196, 4.6424519, 4.5945888, 4.6318037, 4.5045904),
    "bfloat16": (4.7374858, 4.6134621, 4.5663193, 4.5998489, 4.4915207),
    "int8": (4.7374891, 4.6134602, 4.5663185, 4.5998405, 4.4915232),
    "fp8": (4.7374794, 4.6134636, 4.5663691, 4.59987, 4.4915474),
    "tied-owner-int8": (4.7505236, 4.6424532, 4.5945845, 4.6318052, 4.5045949),
}
"""Served losses of the serving-gap sweep by seed. Its cells share their trainings."""


def named(values):
    return {(name,): dict(enumerate(row)) for name, row in values.items()}


def serving_gap(values):
    trainings = {cell: [f"training {seed}" for seed in by_seed] for cell, by_seed in values.items()}
    return Ranking(values, ("plain",), trainings)


def made(table, **options):
    """Rank cells c0, c1, ... by a table of cells and seeds, each with trainings of its own."""
    values = {(f"c{i}",): {s: float(v) for s, v in enumerate(row) if not math.isnan(v)}
              for i, row in enumerate(table)}  # fmt: skip
    return Ranking(values, ("c0",), {}, **options)


def test_a_worse_cell_without_the_highest_seed_is_not_the_best():
    values = named(SERVING_GAP)
    for name in ("tied-owner", "tied-overwrite"):
        del values[name,][0]
    plain_means = {cell: np.mean(list(by_seed.values())) for cell, by_seed in values.items()}
    assert min(plain_means, key=plain_means.__getitem__) == ("tied-owner",), "as it was ranked"
    ranking = serving_gap(values)
    found = ranking.best(ranking.cells)
    worse = {("tied-owner",), ("tied-overwrite",), ("tied-owner-int8",)}
    assert not worse & {found.levels, *found.rivals}
    difference = ranking.against(("plain",))["tied-owner",]
    assert difference.value == pytest.approx(0.0255714, abs=1e-6)
    pairs = list(values["tied-owner",].values()), SERVING_GAP["plain"][1:]
    assert stats.ttest_rel(*pairs).confidence_interval().low > 0
    base = np.mean(SERVING_GAP["plain"])
    assert ranking.means["tied-owner",] == pytest.approx(base + difference.value)
    assert found.largest_loss < 1e-4, "cells that differ by rounding bound each other closely"


def test_with_equal_seeds_means_are_means():
    table = np.random.default_rng(1).normal(4, 1, (5, 4))
    means = made(table).means
    assert list(means.values()) == pytest.approx(table.mean(axis=1))


def test_cells_without_a_seed_of_the_baseline_are_linked_through_others():
    nan = math.nan
    table = [[1, 2, nan, nan, nan], [nan, 4, 5, nan, nan], [nan, nan, 4, 6, nan],
             [nan, nan, nan, 5, nan], [nan, nan, nan, nan, 9]]  # fmt: skip
    # c1 is 2 above c0 at seed 1; c2 is 1 below c1 at seed 2; c3 is 1 below c2 at seed 3
    assert made(table).means == {("c0",): 1.5, ("c1",): 3.5, ("c2",): 2.5, ("c3",): 1.5}
    unlinked = made(table).best([("c0",), ("c4",)])
    assert (unlinked.levels, unlinked.largest_loss) == (("c0",), 0.0)


def test_critical_values_by_integration():
    """P(max of m independent |Z| <= t s) over the density of s = sqrt(chi-square / df)."""
    for tests, df, sides in itertools.product((2, 17), (1.0, 4.0), (1, 2)):
        for t in (1.5, 20.0):

            def inside(s, t=t, sides=sides):
                return 1 - sides * stats.norm.sf(t * s)

            def covered(s, df=df, tests=tests):
                return inside(s) ** tests * 2 * s * df * stats.chi2.pdf(df * s * s, df)

            expected = 1 - integrate.quad(covered, 0, 1)[0] - integrate.quad(covered, 1, 30)[0]
            family = Family(tests, 0, 0.05, sides)
            df_used = math.exp(0.05 * math.floor(math.log(df) / 0.05 + 1e-9))
            if df_used == df:
                assert family.p_value(t, df, is_pooled=True) == pytest.approx(expected, abs=1e-6)
        critical = Family(tests, 0, 0.05, sides).critical(df, is_pooled=True)
        assert Family(tests, 0, 0.05, sides).p_value(critical, df, is_pooled=True) == (
            pytest.approx(0.05, abs=1e-6)
        )
        assert critical <= stats.t.isf(0.05 / tests / sides, df * 0.95) * 1.001


def test_effective_degrees_of_freedom():
    random = np.random.default_rng(3)
    independent = random.normal(0, 1, (100, 1000))
    assert pool_variance(independent, 99 * 999, 999).df > 0.85 * 99 * 999
    one_pattern = np.outer(random.normal(0, 1, 9), random.normal(0, 1, 4))
    assert pool_variance(one_pattern, 24, 3).df == pytest.approx(3), "as few as one cell's"


def test_two_cells_are_the_paired_t_test():
    table = np.random.default_rng(2).normal(4, 0.1, (2, 6))
    found = made(table).against(("c0",))["c1",]
    theirs = stats.ttest_rel(table[1], table[0])
    interval = theirs.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-6)
    assert found.p == pytest.approx(theirs.pvalue, rel=1e-6)


def brute_force_best(table, higher):
    """Multiple comparisons with the best, cell by cell and pair by pair."""
    loss = -table if higher else table
    n_cells, n_seeds = loss.shape
    centred = loss - loss.mean(1)[:, None] - loss.mean(0)[None, :] + loss.mean()
    df = (n_cells - 1) * (n_seeds - 1)
    pooled = 2 * (centred**2).sum() / df
    covariance = np.cov(centred)
    effective = (n_seeds - 1) * np.trace(covariance) ** 2 / np.trace(covariance @ covariance)
    left, bounds = [], {}
    for one in range(n_cells):
        ends = {}
        for other in set(range(n_cells)) - {one}:
            differences = loss[one] - loss[other]
            own = differences.var(ddof=1)
            freedom = effective if pooled >= own else math.sqrt(effective * (n_seeds - 1))
            critical = Family(n_cells - 1, 0, 0.05, 1).critical(freedom, is_pooled=True)
            error = math.sqrt(max(own, pooled) / n_seeds)
            ends[other] = differences.mean() - critical * error
        bounds[one] = ends
        if max(ends.values()) <= 0:
            left.append(one)
    best = min(left, key=lambda one: loss[one].mean())
    return best, set(left) - {best}, max([0, *(-bounds[i][best] for i in left if i != best)])


@pytest.mark.parametrize("higher", [False, True])
def test_the_best_by_brute_force(higher):
    random = np.random.default_rng(7)
    seen = set()
    for _ in range(40):
        n_cells, n_seeds = random.integers(2, 8), random.integers(3, 7)
        table = random.normal(0, 1, (n_cells, n_seeds)) + random.normal(0, 4, (n_cells, 1))
        ranking = made(table, higher_is_better=higher)
        found = ranking.best(ranking.cells)
        best, rivals, bound = brute_force_best(table, higher)
        assert found.levels == (f"c{best}",)
        assert set(found.rivals) == {(f"c{i}",) for i in rivals}
        assert found.largest_loss == pytest.approx(bound)
        seen.add(len(rivals))
    assert {0, 1} < seen


def test_one_seed_tells_nothing_apart():
    ranking = made([[1.0], [2.0], [3.0]])
    found = ranking.best(ranking.cells)
    assert (found.levels, found.rivals) == (("c0",), (("c1",), ("c2",)))
    assert found.largest_loss is None
    assert {e.kind for e in ranking.against(("c0",)).values()} == {"one seed"}
    assert not ranking.told_apart(("c0",), ("c1",))


def test_shares_that_agree_by_chance_are_not_told_apart():
    table = [[0.25, 0.3], [0.2, 0.25], [0.25, 0.3]]
    ranking = made(table, higher_is_better=True, in_steps=True)
    assert ranking.against(("c0",))["c1",].kind == "unvaried"
    assert ranking.against(("c0",))["c2",].kind == "identical"
    assert ("c1",) in ranking.best(ranking.cells).rivals


tables = st.integers(2, 6).flatmap(
    lambda n: st.lists(
        st.lists(st.one_of(st.none(), st.floats(-9, 9)), min_size=4, max_size=4),
        min_size=n, max_size=n,
    )
)  # fmt: skip


@given(tables, st.booleans())
@settings(max_examples=30, deadline=None)
def test_any_table_is_ranked(rows, share_trainings):
    """Never an exception; the best is a cell with a mean; verdict and interval agree."""
    values = {(f"c{i}",): {s: v for s, v in enumerate(row) if v is not None}
              for i, row in enumerate(rows)}  # fmt: skip
    trainings = {cell: ["same"] if share_trainings else [] for cell in values}
    ranking = Ranking(values, ("c0",), trainings)
    found = ranking.best(ranking.cells)
    assert (found is None) == (not ranking.means)
    if found:
        assert {found.levels, *found.rivals} <= ranking.means.keys()
        assert found.largest_loss is None or found.largest_loss >= 0
    for one in ranking.against(("c0",)).values():
        assert one.low <= one.value <= one.high
        if one.kind == "tested":
            assert (one.p < 0.05 - 1e-6) <= (not one.low <= 0 <= one.high)
            assert (one.p > 0.05 + 1e-6) <= (one.low <= 0 <= one.high)


@pytest.mark.parametrize("structure", ["alike", "one noisy cell", "levels by seed", "missing"])
def test_null_sweeps(structure):
    """Of 200 sweeps 5% are 10, with a standard error of 3."""
    wrong = simulate_rankings(structure, cells=6, seeds=3, sweeps=200)
    assert max(wrong.values()) <= 0.05 + 2 * 0.0154, wrong


def test_power_beside_the_pairs():
    """All pairs at 3 seeds need |t| above 55 for 18 cells; the comparison with the best below 9."""
    critical = Family(17, 0, 0.05, 1).critical(2.0, is_pooled=True)
    assert critical < 9
    assert stats.t.isf(0.025 / 153, 2) > 50
    random = np.random.default_rng(9)
    table = random.normal(0, 0.01, (18, 3)) + random.normal(0, 0.1, 3) + 0.2 * (np.arange(18) > 0)[:, None]  # fmt: skip
    assert made(table).best([(f"c{i}",) for i in range(18)]).rivals == ()
