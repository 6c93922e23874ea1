"""Verdicts, intervals and corrected p-values are one procedure, whatever the numbers are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvlab.analysis.cell_comparisons import judge_gaps
from kvlab.analysis.standard_errors import StandardError
from kvlab.analysis.statistics import t_cdf, t_quantile
from kvlab.analysis.verdicts import VERDICTS, judge_family, judge_interval

DF = st.sampled_from([1.0, 2.0, 3.7, 20.0])
ONE = st.tuples(st.floats(-1, 1).filter(bool), st.floats(1e-3, 1), DF)
FAMILIES = st.lists(ONE, min_size=1, max_size=8)
SMALL = ("bounded", "worse within", "equivalent")
CLAIMS = ("better", "worse", "worse within", "higher", "lower")


def judged(family, margin, alpha=0.05):
    errors = [StandardError(error, df) for _, error, df in family]
    return judge_family([value for value, _, _ in family], errors, alpha, margin)


@settings(max_examples=200)
@given(FAMILIES, st.none() | st.floats(0.01, 2), st.sampled_from(["lower", "higher", "neither"]))
def test_a_verdict_says_what_its_interval_says(family, margin, better):
    """A row that is within noise has zero inside its interval, and no other row has.

    Intervals are Bonferroni's, cut at zero.
    """
    level = 1 - 0.05 / (2 * len(family))
    for (value, error, df), test in zip(family, judged(family, margin), strict=True):
        reach = t_quantile(level, df) * error
        assert test.low == 0.0 or test.low == pytest.approx(value - reach, rel=1e-9)
        assert test.high == 0.0 or test.high == pytest.approx(value + reach, rel=1e-9)
        assert test.low <= value <= test.high
        verdict = judge_interval(test.low, test.high, better, margin)
        assert (test.low < 0 < test.high) == (verdict not in CLAIMS)
        assert (test.p <= 0.05) == (verdict in CLAIMS)
        cost = -test.low if better == "higher" else test.high
        if margin is not None and better != "neither":
            assert (verdict in SMALL) == (cost < margin and verdict != "better")
        assert (margin is None) <= (verdict not in (*SMALL, "undecided"))
        wrong = judge_interval(test.low, test.high, better, margin, went_wrong=1)
        small = "worse" if verdict in CLAIMS else "unbounded"
        assert wrong == (small if verdict in SMALL else verdict)


def test_the_margin_keeps_its_error():
    """One claim is found and may be beyond the margin: the other gets 3/4 of alpha, not all."""
    errors = [StandardError(0.001, 1e6), StandardError(1.0, 1e6)]
    z = t_quantile(1 - 0.05 / 2 * 0.9, 1e6)  # significant at 0.9 alpha
    assert judge_family([1.0, z], errors, 0.05)[1].low == 0.0
    assert judge_family([1.0, z], errors, 0.05, margin=0.02)[1].low < 0
    assert judge_family([0.01, z], errors, 0.05, margin=0.02)[1].low == 0.0, "nothing is kept"


@pytest.mark.parametrize(
    ("low", "high", "better", "margin", "expected"),
    [
        (0.01, 0.03, "lower", None, "worse"),
        (0.01, 0.03, "lower", 0.02, "worse"),
        (0.01, 0.03, "lower", 0.04, "worse within"),
        (-0.03, -0.01, "lower", 0.02, "better"),
        (-0.03, -0.01, "higher", 0.04, "worse within"),
        (-0.05, 0.01, "lower", 0.02, "bounded"),
        (-0.01, 0.05, "lower", 0.02, "undecided"),
        (-0.01, 0.05, "higher", 0.02, "bounded"),
        (-0.01, 0.05, "lower", None, "within noise"),
        (-0.01, 0.01, "neither", 0.02, "equivalent"),
        (0.0, 0.01, "neither", None, "higher"),
        (-0.2, 0.0, "neither", None, "lower"),
    ],
)
def test_words(low, high, better, margin, expected):
    assert judge_interval(low, high, better, margin) == expected
    assert expected in VERDICTS


@settings(max_examples=100)
@given(FAMILIES, st.none() | st.lists(st.floats(0.05, 1), min_size=8, max_size=8))
def test_weighted_holm_by_brute_force(family, raw):
    """A difference is found if every set that contains it has one below its part of alpha.

    Holm's weighted method is the closed test of weighted Bonferroni tests.
    """
    parts = (raw or [1.0] * 8)[: len(family)]
    weights = [one / sum(parts) for one in parts]
    given_weights = {"weights": weights} if raw else {}
    own = [2 * t_cdf(-abs(value) / error, df) for value, error, df in family]
    errors = [StandardError(error, df) for _, error, df in family]
    found = judge_family([value for value, _, _ in family], errors, 0.05, **given_weights)

    def adjusted(members):
        total = sum(weights[n] for n in members)
        return min(own[n] * total / weights[n] for n in members)

    codes = range(1, 2 ** len(family))  # at most 255
    sets = [[n for n in range(len(family)) if code >> n & 1] for code in codes]
    for number, test in enumerate(found):
        expected = min(1.0, max(adjusted(members) for members in sets if number in members))
        assert test.p == pytest.approx(expected, rel=1e-6, abs=1e-12)
        value, error, df = family[number]
        reach = t_quantile(1 - 0.05 * weights[number] / 2, df) * error
        assert test.high == pytest.approx(value + reach, rel=1e-9) or test.high == 0.0
        assert (test.low < 0 < test.high) == (test.p > 0.05)


def test_part_of_the_error_is_spent_at_most():
    """Weights of half in all are tests at half of alpha, where Holm passes on no more."""
    errors = [StandardError(1.0, 9.0)] * 3
    half = judge_family([1.0, -2.0, 4.0], errors, 0.05, weights=[1 / 6] * 3)
    whole = judge_family([1.0, -2.0, 4.0], errors, 0.025)
    assert [(one.low, one.high) for one in half] == [(one.low, one.high) for one in whole]
    assert [one.p for one in half] == pytest.approx([min(1.0, 2 * one.p) for one in whole])


def test_serving_gaps_that_are_rounding_or_of_one_training_are_not_tested():
    def gaps(*values):
        return dict(enumerate(values))

    rows = [gaps(3e-5, 5e-5, 4e-5), gaps(1.4), gaps(0.01, 0.011, 0.012)]
    rounding, single, real = judge_gaps(rows, 0.05, 1e-4)
    assert (rounding.kind, rounding.p, rounding.is_found) == ("identical", 1.0, False)
    assert (single.kind, single.p, single.is_found) == ("one seed", 1.0, False)
    alone = stats.ttest_1samp([0.01, 0.011, 0.012], 0.0)
    low, high = alone.confidence_interval(0.95)
    assert (real.low, real.high) == pytest.approx((max(0.0, low), high))
    assert real.value == pytest.approx(0.011)
    assert real.p == pytest.approx(alone.pvalue), "what is not tested costs the others nothing"
