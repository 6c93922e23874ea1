"""The statistics against scipy on the same numbers, and by simulation."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from kvlab.report.statistics.grouped import POWER, estimate, smallest_detectable
from kvlab.report.statistics.holm import holm
from kvlab.report.statistics.items import compare_items, mcnemar

EXACT = {"rel": 1e-9, "abs": 1e-12}


def test_one_group_is_the_paired_t_test():
    random = np.random.default_rng(1)
    one, other = random.normal(4.0, 0.1, 7), random.normal(4.1, 0.1, 7)
    found = estimate([(one - other).tolist()], 4.0)
    theirs = stats.ttest_rel(one, other)
    interval = theirs.confidence_interval(0.95)
    assert found.kind == "tested"
    assert found.p == pytest.approx(theirs.pvalue, **EXACT)
    assert found.df == pytest.approx(theirs.df, **EXACT)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), **EXACT)


def test_two_groups_have_welchs_statistic():
    random = np.random.default_rng(2)
    one, other = random.normal(0.3, 0.01, 4), random.normal(0.1, 0.5, 6)
    found = estimate([one.tolist(), other.tolist()], 1.0)
    # The mean of both is zero exactly if the first differs from minus the second by nothing.
    theirs = stats.ttest_ind(one, -other, equal_var=False)
    assert found.value / found.error == pytest.approx(theirs.statistic, **EXACT)
    parts, freedoms = np.array([one.var(ddof=1) / 4, other.var(ddof=1) / 6]), np.array([3, 5])
    df = parts.sum() ** 2 / (parts**2 / (freedoms + 2)).sum() - 2
    assert found.df == pytest.approx(df, **EXACT)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(theirs.statistic), df), **EXACT)
    interval = stats.t.interval(0.95, df, found.value, found.error)
    assert (found.low, found.high) == pytest.approx(interval, **EXACT)


def test_degrees_of_freedom_stay_within_what_the_groups_have():
    alike = estimate([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]], 1.0)
    assert alike.df == 3.0
    one_decides = estimate([[0.0, 1.0], [0.0, 1e-9], [0.0, 1e-9]], 1.0)
    assert one_decides.df == pytest.approx(1.0)


def test_conditions_that_differ_from_each_other_are_not_noise():
    found = estimate([[0.1, 0.1001], [0.9, 0.8999]], 4.0)
    assert found.value == pytest.approx(0.5)
    assert found.high - found.low < 0.01


def test_a_condition_with_one_seed_borrows_the_others_spread():
    with_it = estimate([[0.1, 0.3], [0.2]], 1.0)
    assert with_it.kind == "tested"
    assert with_it.value == pytest.approx(0.2)
    # Variance of the mean: (0.02 / 2 + 0.02 / 1) / 4.
    assert with_it.error == pytest.approx(math.sqrt(0.03 / 4))
    assert with_it.df == 1.0


@pytest.mark.parametrize(
    ("groups", "kind", "value"),
    [
        ([[0.2]], "one seed", 0.2),
        ([[0.2], [0.4]], "one seed", 0.3),
        ([[0.0, 0.0], [0.0]], "identical", 0.0),
        ([[1e-16, -1e-16]], "identical", 0.0),
        ([[0.5, 0.5]], "exact", 0.5),
        ([[0.5, 0.5], [0.7, 0.7]], "exact", 0.6),
    ],
)
def test_what_cannot_be_tested_is_not(groups, kind, value):
    found = estimate(groups, 4.0)
    assert (found.kind, found.value) == (kind, pytest.approx(value))
    assert found.low == found.high == pytest.approx(value)


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("spreads", [[1.0], [3.0, 1.0]])
def test_no_false_calls_and_honest_intervals_by_simulation(seeds, spreads):
    """Comparisons without any difference, in the shapes that sweeps have."""
    random = np.random.default_rng(3)
    for groups in (1, 2, 4, 6):
        spread = np.resize(spreads, groups)[:, None]
        drawn = random.normal(size=(3000, groups, seeds)) * spread
        covered = [e.low <= 0 <= e.high for e in (estimate(d.tolist(), 1.0) for d in drawn)]
        assert 0.93 <= np.mean(covered) <= 0.97, groups


def test_holm_against_its_definition():
    random = np.random.default_rng(4)
    for size in (1, 2, 7):
        p = random.uniform(0, 0.2, size).tolist()
        corrected = holm(p)
        for level in (0.01, 0.05, 0.1):
            rejected = set()
            for rank, index in enumerate(sorted(range(size), key=p.__getitem__)):
                if p[index] > level / (size - rank):
                    break
                rejected.add(index)
            assert {index for index, value in enumerate(corrected) if value <= level} == rejected


def test_holm_is_that_of_statsmodels():
    from statsmodels.stats.multitest import multipletests

    random = np.random.default_rng(8)
    for size in (1, 2, 7, 40):
        p = random.uniform(0, 0.2, size)
        assert holm(p.tolist()) == pytest.approx(multipletests(p, method="holm")[1], **EXACT)


def test_holm_calls_nothing_in_95_percent_of_null_families():
    random = np.random.default_rng(5)
    families = random.uniform(size=(1000, 6))
    assert np.mean([min(holm(family.tolist())) < 0.05 for family in families]) < 0.065


@pytest.mark.parametrize(("df", "tests"), [(2.0, 1), (5.0, 4), (11.0, 1)])
def test_smallest_detectable_difference_is_called_with_that_power(df, tests):
    from statsmodels.stats.power import TTestPower

    shift = smallest_detectable(1.0, df, tests)
    threshold = stats.t.ppf(1 - 0.025 / tests, df)
    assert 1 - stats.nct.cdf(threshold, df, shift) == pytest.approx(POWER, abs=1e-9)
    theirs = TTestPower().power(shift / (df + 1) ** 0.5, df + 1, 0.025 / tests, df, "larger")
    assert theirs == pytest.approx(POWER, abs=1e-9)


def test_mcnemar_is_the_exact_binomial_test():
    from statsmodels.stats.contingency_tables import mcnemar as sm_mcnemar

    for gained, lost in itertools.product((0, 1, 5, 40), (0, 3, 21)):
        expected = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
        assert mcnemar(gained, lost) == pytest.approx(expected, **EXACT)
        if gained + lost:
            theirs = sm_mcnemar([[0, gained], [lost, 0]], exact=True).pvalue
            assert mcnemar(gained, lost) == pytest.approx(theirs, **EXACT)


def test_items_at_one_seed():
    a, b = [True, True, False, False, True], [True, False, True, True, True]
    found = compare_items([(a, b)])
    difference = np.array(b, float) - np.array(a, float)
    assert (found.gained, found.lost, found.items) == (2, 1, 5)
    assert found.difference == pytest.approx(0.2)
    assert found.error == pytest.approx(stats.sem(difference))
    assert found.p == pytest.approx(stats.binomtest(2, 3).pvalue)


def test_items_at_one_seed_and_repeated_say_the_same():
    """The same outcomes at every seed are no more evidence than once."""
    random = np.random.default_rng(6)
    a, b = random.random(400) < 0.4, random.random(400) < 0.5
    once, thrice = compare_items([(a, b)]), compare_items([(a, b)] * 3)
    gained, lost = once.gained, once.lost
    chi_square = (gained - lost) ** 2 / (gained + lost)
    assert thrice.p == pytest.approx(stats.chi2.sf(chi_square, 1), **EXACT)
    assert thrice.difference == pytest.approx(once.difference)
    assert thrice.error == pytest.approx(once.error)
    assert thrice.gained == 3 * gained


def test_items_do_not_call_what_is_not_there():
    random = np.random.default_rng(7)
    ability = random.uniform(0.1, 0.6, 200)
    called = 0
    for _ in range(400):
        pairs = [(random.random(200) < ability, random.random(200) < ability) for _ in range(2)]
        called += compare_items(pairs).p < 0.05
    assert called / 400 < 0.085
