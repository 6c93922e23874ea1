"""Rankings: unequal seeds, pooled differences, the best of many, by hand and by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvlab.analysis.rankings import Ranking
from tests.studies.null_sweeps import NO_PAIRS, rank


def made(table, **options):
    """Rank cells c0, c1, ... by a table of cells and seeds, each with trainings of its own."""
    values = {(f"c{i}",): {s: float(v) for s, v in enumerate(row) if not math.isnan(v)}
              for i, row in enumerate(table)}  # fmt: skip
    return Ranking(values, ("c0",), {}, **options)


def test_cells_are_ranked_at_seeds_that_they_share_with_the_baseline():
    nan = math.nan
    table = [[1, 2, nan, nan], [nan, 4, 5, nan], [nan, nan, nan, 9]]
    assert made(table).means == {("c0",): 1.5, ("c1",): 3.5}
    unlinked = made(table).best([("c0",), ("c2",)])
    assert (unlinked.levels, unlinked.largest_loss) == (("c0",), 0.0)


def brute_force_best(table, higher):
    """Multiple comparisons with the best, cell by cell and pair by pair.

    The pooled variance is the mean variance of the differences from the first cell, over the
    squared length of these contrasts: over seeds of the differences where seeds explain something,
    else of both cells' trainings. Its degrees of freedom are Satterthwaite's, with equal variances
    and with those that were found.
    """
    loss = -table if higher else table
    n_cells, n_seeds = loss.shape
    differences = loss[1:] - loss[0]
    variances = loss.var(axis=1, ddof=1)
    residuals = loss - loss.mean(1)[:, None] - loss.mean(0)[None, :] + loss.mean()
    left_df = (n_cells - 1) * (n_seeds - 1)
    of_seeds = n_cells * loss.mean(0).var(ddof=1) / ((residuals**2).sum() / left_df)
    is_paired = n_cells <= 3 or stats.f.sf(of_seeds, n_seeds - 1, left_df) < 0.05
    contrasts = np.hstack([-np.ones((n_cells - 1, 1)), np.eye(n_cells - 1)])
    pooled, effective = differences.var(axis=1, ddof=1).mean() / 2, math.inf
    for noise in (np.ones(n_cells), (residuals**2).sum(1)):
        covariance = contrasts @ np.diag(noise) @ contrasts.T
        freedom = (n_seeds - 1) * np.trace(covariance) ** 2 / (covariance**2).sum()
        effective = min(effective, freedom)
    if not is_paired:
        shares = (contrasts**2).mean(axis=0) / 2
        pooled, effective = shares @ variances, math.inf
        for parts in (shares, shares * (residuals**2).sum(1)):
            effective = min(effective, (n_seeds - 1) * parts.sum() ** 2 / (parts**2).sum())
    left, bounds = [], {}
    for one in range(n_cells):
        ends = {}
        for other in set(range(n_cells)) - {one}:
            values = loss[one] - loss[other]
            own, own_df = values.var(ddof=1), n_seeds - 1
            if not is_paired:
                pair = variances[[one, other]]
                own, own_df = pair.sum(), (n_seeds - 1) * pair.sum() ** 2 / (pair**2).sum()
            freedom = effective if 2 * pooled >= own else math.sqrt(effective * own_df)
            error = math.sqrt(max(own, 2 * pooled) / n_seeds)
            ends[other] = values.mean() - stats.t.isf(0.05 / (n_cells - 1), freedom) * error
        bounds[one] = ends
        if max(ends.values()) <= 0:
            left.append(one)
    best = min(left, key=lambda one: loss[one].mean())
    rivals = set(left) - {best}
    return best, rivals, max([0, *(-bounds[i][best] for i in rivals)]), is_paired


@pytest.mark.parametrize("higher", [False, True])
def test_the_best_by_brute_force(higher):
    random = np.random.default_rng(7)
    seen, kinds = set(), set()
    for number in range(24):
        n_cells, n_seeds = random.integers(2, 8), random.integers(3, 7)
        table = random.normal(0, 1, (n_cells, n_seeds)) + random.normal(0, 4, (n_cells, 1))
        table += number % 2 * random.normal(0, 2, n_seeds)
        ranking = made(table, higher_is_better=higher)
        found = ranking.best(ranking.cells)
        best, rivals, bound, is_paired = brute_force_best(table, higher)
        assert found.levels == (f"c{best}",)
        assert set(found.rivals) == {(f"c{i}",) for i in rivals}
        assert found.largest_loss == pytest.approx(bound)
        seen.add(len(rivals))
        kinds.add(is_paired)
    assert {0, 1} < seen
    assert kinds == {True, False}


def test_shares_that_agree_by_chance_are_not_told_apart():
    table = [[0.25, 0.3], [0.2, 0.25], [0.25, 0.3]]
    ranking = made(table, higher_is_better=True, in_steps=True)
    assert ranking.difference(("c1",), ("c0",)).kind == "unvaried"
    assert ranking.difference(("c2",), ("c0",)).kind == "identical"
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
    found = [ranking.difference(cell, ("c0",)) for cell in values if cell != ("c0",)]
    for one in filter(None, found):
        assert one.low <= one.value <= one.high
        if one.kind == "tested":
            assert (one.p < 0.05 - 1e-6) <= (not one.low <= 0 <= one.high)
            assert (one.p > 0.05 + 1e-6) <= (one.low <= 0 <= one.high)


@pytest.mark.parametrize(
    "structure", [f"alike{NO_PAIRS}", "one noisy cell", "missing", f"tied at serving{NO_PAIRS}"]
)
def test_null_sweeps(structure):
    """Of 200 sweeps 5% are 10, with a standard error of 3."""
    wrong = rank(structure, cells=6, seeds=3, sweeps=200)
    assert max(wrong.values()) <= 0.05 + 2 * 0.0154, wrong
