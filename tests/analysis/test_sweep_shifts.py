"""Comparisons of two sweeps: equal truths are called changed rarely, planted changes are found."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from kvlab.analysis.study import Study
from kvlab.analysis.sweep_shifts import estimate_shifts
from kvlab.store import Store
from tests.analysis.test_effects import Memory


def study(cells):
    rows = [row for by_seed in cells.values() for row in by_seed.values()]
    base = {factor: levels[0] for factor, levels in Memory.factors.items()}
    return Study(Store("nowhere"), {"name": "m", "factors": Memory.factors, "baseline": base}, rows)


def renumbered(cells, first):
    """The same trials at other seeds."""
    return {
        levels: {seed + first: replace(row, seed=seed + first) for seed, row in by_seed.items()}
        for levels, by_seed in cells.items()
    }


def shifts(before, after):
    one, other = study(before), study(after)
    return estimate_shifts(one, other, {levels: levels for levels in one.cells}, "loss")


@pytest.mark.parametrize("first", [0, 100])
def test_a_level_that_changed_is_found(first):
    random = np.random.default_rng(4)
    before = Memory(5).cells(random)
    after = renumbered(Memory(5).cells(random, {"heads=mqa": 0.3}), first)
    found_shifts = shifts(before, after)
    assert found_shifts.is_paired == (first == 0)
    assert found_shifts.effects["heads=mqa"].is_found
    assert found_shifts.effects["heads=mqa"].value == pytest.approx(0.3, abs=0.03)
    assert not found_shifts.effects["position=rope"].is_found
    assert not found_shifts.effects["heads=mqa and position=rope"].is_found
    moved = {c for c, one in found_shifts.against_baseline.items() if one.is_found}
    assert {"mha"}.isdisjoint({levels[0] for levels in moved})


def test_the_same_trials_are_identical():
    cells = Memory(3).cells(np.random.default_rng(5))
    same = shifts(cells, cells)
    every = [*same.cells.values(), *same.effects.values()]
    assert {one.kind for one in every} == {"identical"}


def test_independent_seeds_are_welch():
    random = np.random.default_rng(6)
    before, after = Memory(3).cells(random), renumbered(Memory(6).cells(random), 50)
    found_shifts = shifts(before, after)
    for levels, shift in found_shifts.cells.items():
        one, other = (
            [row.measurements["loss"] for row in cells[levels].values()]
            for cells in (before, after)
        )
        theirs = stats.ttest_ind(other, one, equal_var=False)
        assert shift.value / shift.error.value == pytest.approx(theirs.statistic, rel=1e-9)
        assert shift.error.df == pytest.approx(theirs.df, rel=1e-9)
