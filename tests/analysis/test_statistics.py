"""The statistics against scipy on the same numbers, and by simulation."""

import itertools

import numpy as np
import pytest
from scipy import stats

from kvlab.analysis.statistics import (
    POWER,
    compare_items,
    estimate,
    sign_flip_test,
    smallest_detectable,
)
from kvlab.store.metrics import METRICS

EXACT = {"rel": 1e-9, "abs": 1e-12}


def test_it_is_the_paired_t_test():
    random = np.random.default_rng(1)
    for count in (2, 7):
        one, other = random.normal(4.0, 0.1, count), random.normal(4.1, 0.1, count)
        found = estimate((one - other).tolist(), 4.0)
        theirs = stats.ttest_rel(one, other)
        interval = theirs.confidence_interval(0.95)
        assert found.kind == "tested"
        assert found.value / found.standard_error == pytest.approx(theirs.statistic, **EXACT)
        assert found.p == pytest.approx(theirs.pvalue, **EXACT)
        assert found.df == theirs.df
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high), **EXACT)


@pytest.mark.parametrize(
    ("differences", "kind", "value"),
    [
        ([0.2], "one seed", 0.2),
        ([0.0], "identical", 0.0),
        ([0.0, 0.0], "identical", 0.0),
        ([1e-16, -1e-16], "identical", 0.0),
        ([0.5, 0.5], "exact", 0.5),
    ],
)
def test_what_cannot_be_tested_is_not(differences, kind, value):
    found = estimate(differences, 4.0)
    assert (found.kind, found.value) == (kind, pytest.approx(value))
    assert found.low == found.high == pytest.approx(value)


def test_seeds_that_agree_prove_nothing_of_shares():
    """Of 40 items each, two models are by chance 1 item apart at both seeds once in a while."""
    found = estimate([0.025, 0.025], 0.3, in_steps=True)
    assert (found.kind, found.p) == ("unvaried", 1)
    assert all(METRICS[name].is_share for name in ("hellaswag_acc", "hellaswag_acc_norm_served"))
    assert not any(METRICS[name].is_share for name in ("loss", "kv_bytes_storage", "tpot_ms_p50"))


@pytest.mark.parametrize(("df", "tests"), [(2, 1), (5, 4)])
def test_smallest_detectable_difference_is_called_with_that_power(df, tests):
    from statsmodels.stats.power import TTestPower

    shift = smallest_detectable(1.0, df, 0.05 / tests)
    threshold = stats.t.ppf(1 - 0.025 / tests, df)
    assert 1 - stats.nct.cdf(threshold, df, shift) == pytest.approx(POWER, abs=1e-9)
    theirs = TTestPower().power(shift / (df + 1) ** 0.5, df + 1, 0.025 / tests, df, "larger")
    assert theirs == pytest.approx(POWER, abs=1e-9)


def test_items_at_one_seed_are_tested_by_mcnemars_exact_test():
    from statsmodels.stats.contingency_tables import mcnemar

    for gained, lost in itertools.product((0, 1, 5, 40), (0, 3, 21)):
        a, b = [False] * gained + [True] * lost + [True], [True] * gained + [False] * lost + [True]
        theirs = mcnemar([[1, gained], [lost, 0]], exact=True).pvalue if gained + lost else 1.0
        found = compare_items([(a, b)])
        assert found.p == pytest.approx(theirs, **EXACT)
        assert (found.gained, found.lost, found.items) == (gained, lost, gained + lost + 1)
        assert found.difference == pytest.approx((gained - lost) / found.items)


@pytest.mark.parametrize("seeds", [1, 3])
def test_intervals_over_items_say_what_their_test_says(seeds):
    random = np.random.default_rng(9)
    sides = set()
    for number in range(30):
        gain = 0.02 * (number % 9)
        ability = random.uniform(0.1, 0.6, 150)
        one = random.random((seeds, 150)) < ability
        other = random.random((seeds, 150)) < ability + gain
        found = compare_items(list(zip(one, other, strict=True)))
        for alpha in (0.05, 0.01):
            low, high = found.interval(alpha)
            assert low <= found.difference <= high
            assert (low > 0 or high < 0) == (found.p < alpha)
            sides.add(low > 0)
    assert sides == {True, False}


def every_pattern(differences):
    """The definition: all sign patterns, one by one."""
    patterns = np.array([*itertools.product((1, -1), repeat=len(differences))])
    return np.mean(abs(patterns @ differences) >= abs(sum(differences)) - 1e-12)


def test_sign_flips_are_all_patterns():
    random = np.random.default_rng(10)
    for count in (1, 2, 5, 9):
        differences = random.integers(-3, 5, count).tolist()
        assert sign_flip_test(differences) == pytest.approx(every_pattern(differences), **EXACT)
    assert sign_flip_test([0, 0]) == 1.0
    assert sign_flip_test([1] * 6 + [0]) == 2**-5
    theirs = stats.binomtest(70, 110).pvalue
    assert sign_flip_test([1] * 70 + [-1] * 40) == pytest.approx(theirs, **EXACT)


def test_the_interval_at_one_seed_is_clopper_and_pearsons():
    a, b = [True] * 12 + [False] * 30 + [True] * 58, [False] * 12 + [True] * 30 + [True] * 58
    low, high = compare_items([(a, b)]).interval()
    theirs = stats.binomtest(30, 42).proportion_ci(0.95, "exact")
    assert (low, high) == pytest.approx([0.42 * (2 * end - 1) for end in theirs], abs=1e-9)
