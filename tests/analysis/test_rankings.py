"""Rankings: unequal seeds, pooled differences, the best of many, by hand and by simulation."""

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvlab.analysis.rankings import Ranking
from tests.report.reference_errors import Difference, do_seeds_explain, pool_errors
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

    Errors are those of `tests.report.reference_errors`, pooled over the differences from c0.
    """
    losses = {f"c{i}": dict(enumerate(row)) for i, row in enumerate((1 - 2 * higher) * table)}

    def subtract(one, other):
        by_seed = {seed: value - losses[other][seed] for seed, value in losses[one].items()}
        return Difference((), by_seed, {one: 1.0, other: -1.0}, {}, 1.0)

    from_first = [subtract(cell, "c0") for cell in losses if cell != "c0"]
    larger = pool_errors([(one, one.weights) for one in from_first], losses)
    bounds = {cell: {} for cell in losses}
    for one, other in permutations(losses, 2):
        found = subtract(one, other)
        found = larger(found, found.weights)
        reach = stats.t.isf(0.05 / (len(losses) - 1), found.df) * found.error
        bounds[one][other] = found.value - reach
    left = [cell for cell, ends in bounds.items() if max(ends.values()) <= 0]
    best = min(left, key=lambda cell: sum(losses[cell].values()))
    rivals = set(left) - {best}
    is_paired = len(losses) <= 3 or do_seeds_explain(losses)
    return best, rivals, max([0, *(-bounds[one][best] for one in rivals)]), is_paired


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
        assert found.levels == (best,)
        assert set(found.rivals) == {(cell,) for cell in rivals}
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
@settings(max_examples=30)
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
