"""Expected half widths and bounds of looks: against scipy, closed forms, and simulated sweeps."""

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from kvlab.analysis.estimand import Estimand
from kvlab.extensions.expected_precision.design import (
    MAX_BOUND,
    DesignPrecision,
    pool_spread,
    weigh_trainings,
)
from kvlab.own_extensions import find_member
from tests.support.extensions import needs

ONE_FACTOR = {"store": ("base", "1", "2", "3", "4", "5")}


def make_design(factors, seeds=3, looks=(), shared=()):
    """Return the precision of a full design whose levels in ``shared`` change serving alone."""
    cells = list(product(*factors.values()))
    trainings = {
        cell: "-".join(level if level not in shared else "none" for level in cell) for cell in cells
    }
    claims = [f"{factor}={level}" for factor, levels in factors.items() for level in levels[1:]]
    weights = weigh_trainings(trainings, Estimand(list(trainings), factors), claims, "loss")
    return DesignPrecision(len(claims), weights, 0.05, dict.fromkeys(cells, seeds), looks)


@needs("looks")
@pytest.mark.parametrize("claims", [1, 4])
def test_with_looks_a_claim_has_its_own_error_and_the_bound_of_the_last(claims):
    weights = {f"{n}": {("base",): -1.0, (f"{n}",): 1.0} for n in range(claims)}
    seeds = dict.fromkeys([("base",), *((name,) for name in weights)], 10)
    found = DesignPrecision(claims, weights, 0.05, seeds, (3, 5, 7, 10)).half_widths()
    bound = find_member("looks", "bounds")((3, 5, 7, 10), 10, 0.05 / claims)[-1]
    assert DesignPrecision(1, {}, 0.05, {}, (2, 20)).look_bounds()[2] == 10_000, "out of reach"
    assert list(found.values()) == pytest.approx([bound * math.sqrt(2 / 10)] * claims)


def test_a_single_claim_has_the_interval_of_a_t_test():
    found = make_design({"heads": ("mha", "mqa")}, 5).half_widths()
    assert found == {"heads=mqa": pytest.approx(stats.t.isf(0.025, 4) * math.sqrt(2 / 5))}


def test_levels_beside_one_baseline_share_fewer():
    """The baseline has half of the pool, each of K levels 1/(2K): worth 4K/(K+1) cells."""
    found = make_design(ONE_FACTOR, 5).half_widths()
    expected = stats.t.isf(0.05 / 10, 20 / 6 * 4) * math.sqrt(2 / 5)
    assert list(found.values()) == pytest.approx([expected] * 5)


def test_seeds_of_the_baseline_alone_tell_its_spread_and_its_mean():
    design = make_design(ONE_FACTOR, 4)
    more = DesignPrecision(5, design.weights, 0.05, {**design.seeds, ("base",): 12})
    freedom = 1 / (0.5**2 / 11 + 5 * 0.1**2 / 3)
    expected = stats.t.isf(0.05 / 10, freedom) * math.sqrt(1 / 4 + 1 / 12)
    assert list(more.half_widths().values()) == pytest.approx([expected] * 5)


@needs("looks")
@pytest.mark.parametrize("looks", [(3, 5), (3, 5, 7), (3, 5, 7, 10), (2, 3, 20), (2, 3)])
@pytest.mark.parametrize("claims", [1, 5, 10])
def test_the_looks_that_are_proposed_are_the_first_that_decide(looks, claims):
    t_bounds = find_member("looks", "bounds")

    def first_bound(sizes):
        return t_bounds(sizes, sizes[-1], 0.05 / claims)[0]

    design = DesignPrecision(claims, {}, 0.05, {}, looks)
    proposed = design.propose_looks()
    earliest = proposed[0] if proposed else looks[-1]
    assert (looks[0] in design.find_vain_looks()) == (first_bound(looks) > MAX_BOUND)
    assert all(first_bound((n, looks[-1])) > MAX_BOUND for n in range(looks[0], earliest))
    if proposed:
        assert first_bound(proposed) <= MAX_BOUND
        assert proposed[1:] == tuple(size for size in looks if size > proposed[0])


@pytest.mark.parametrize("looks", [(), pytest.param((3, 5), marks=needs("looks"))])
def test_the_seeds_for_a_width_are_the_fewest(looks):
    design = make_design(ONE_FACTOR, 5, looks)
    count = design.count_seeds(0.9)

    def reach(seeds):
        changed = make_design(ONE_FACTOR, seeds, (3, 5, seeds) if looks else ())
        return max(changed.half_widths().values())

    assert reach(count) <= 0.9 < reach(count - 1)
    assert design.count_seeds(0.01) is None


def test_the_spread_is_pooled_over_cells_with_several_trainings():
    random = np.random.default_rng(0)
    groups = [random.normal(mean, 0.1, size).tolist() for mean, size in ((3, 4), (5, 2), (9, 1))]
    variances = [np.var(group, ddof=1) for group in groups[:2]]
    value, count = pool_spread(groups)
    assert (value, count) == (pytest.approx(math.sqrt((3 * variances[0] + variances[1]) / 4)), 6)
    assert pool_spread([[1.0], []]) is None
