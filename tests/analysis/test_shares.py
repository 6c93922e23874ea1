"""Differences of shares of items, near 0 and 1 too: no surer than their items allow."""

import numpy as np
import pytest

from kvlab.analysis.effects import estimate_main_effects
from kvlab.analysis.estimand import Estimand
from kvlab.analysis.interactions import estimate_interactions
from kvlab.analysis.rankings import Ranking
from kvlab.analysis.statistics import estimate, share_variance
from kvlab.store.metrics import METRICS
from tests.studies.null_sweeps import ANSWERS, ONE_OF_5, Structure, measure
from tests.support.cells import make_cells


@pytest.fixture(autouse=True)
def _share_of_items(monkeypatch):
    monkeypatch.setitem(METRICS, "answers", ANSWERS)


def cells(shares, items, same_weights=False):
    """Rows of one seed a column, by cell; a name is one of a single factor."""
    by_cell = {one if isinstance(one, tuple) else (one,): row for one, row in shares.items()}
    made = make_cells(by_cell, "answers", training=lambda cell: "t" if same_weights else cell)
    for row in (row for by_seed in made.values() for row in by_seed.values()):
        row.measurements["answered"] = float(items)
    return made


def judge(shares, items, margin=0.02, **options):
    found = cells(shares, items, **options)
    estimand = Estimand(list(found), {"f": tuple(shares)})
    (effect,) = estimate_main_effects(found, estimand, "answers", margin=margin)
    return effect


@pytest.mark.parametrize(("items", "verdict"), [(8000, "bounded"), (40, "undecided")])
def test_what_is_right_at_every_seed_is_as_sure_as_its_items(items, verdict):
    effect = judge({"base": [1.0] * 3, "level": [1.0] * 3}, items)
    assert effect.verdict_name == verdict
    likely = (items + 2) / (items + 4)
    one = likely * (1 - likely) / items
    assert effect.tested_error.value == pytest.approx((2 * one / 3) ** 0.5)
    assert effect.verdict == {"bounded": "costs less than 2 points"}.get(verdict, verdict)


def test_equal_differences_are_tested_and_fewer_right_answers_are_worse():
    effect = judge({"base": [0.99] * 4, "level": [0.89] * 4}, 4000)
    assert effect.verdict_name == "worse"
    assert effect.low < -0.1 < effect.high < 0
    better = judge({"base": [0.89] * 4, "level": [0.99] * 4}, 4000)
    assert better.verdict_name == "better"


def test_an_interval_stays_among_the_values_that_a_difference_can_have():
    effect = judge({"base": [1.0, 0.2], "level": [0.1, 0.9]}, 100)
    assert (effect.low, effect.high) == (-1.0, 1.0)
    assert effect.detectable is None  # at two seeds; and of three, more than shares can differ by
    assert judge({"base": [1.0] * 3, "level": [0.1, 0.9, 0.5]}, 100).detectable is None


def test_an_interaction_of_shares_reaches_twice_as_far():
    found = {("a", "c"): [0.9, 0.95, 1.0], ("b", "c"): [0.05, 0.1, 0.0],
             ("a", "d"): [0.0, 0.1, 0.05], ("b", "d"): [1.0, 0.9, 0.95]}  # fmt: skip
    estimand = Estimand(list(found), {"first": ("a", "b"), "second": ("c", "d")})
    (effect,) = estimate_interactions(cells(found, 1000), estimand, "answers")
    assert effect.value == pytest.approx(1.8)
    assert 1 < effect.low < effect.value < effect.high <= 2


def test_the_best_of_shares_loses_at_most_all():
    values = {("a",): {0: 1.0, 1: 0.2}, ("b",): {0: 0.1, 1: 0.9}}
    ids, variances = {levels: [str(levels)] for levels in values}, dict.fromkeys(values, 1e-4)
    ranking = Ranking(values, ("a",), ids, higher_is_better=True, item_variances=variances)
    assert ranking.best(values).largest_loss == 1.0


def test_equal_shares_of_equal_weights_are_no_chance():
    assert judge({"base": [0.6] * 3, "level": [0.6] * 3}, 50, same_weights=True).verdict_name == (
        "identical"
    )


def test_a_noisy_level_does_not_widen_the_interval_of_another():
    shares = {"base": [1.0] * 3, "same": [1.0, 0.999, 1.0], "bad": [0.9, 0.3, 0.6]}
    found = cells(shares, 8000)
    estimand = Estimand(list(found), {"f": tuple(shares)})
    together = estimate_main_effects(found, estimand, "answers", margin=0.02)
    assert [one.verdict_name for one in together] == ["bounded", "undecided"]


def test_a_ranking_has_the_least_error_of_an_estimate():
    """``c`` and ``d`` are served with the weights of ``a``, and ``d`` answers alike."""
    shares = {"a": 1.0, "b": 1.0, "c": 0.9, "d": 1.0}
    values = {(name,): {0: share, 1: share} for name, share in shares.items()}
    variance = share_variance(1.0, 100)
    ids = {levels: ["b" if levels == ("b",) else "a"] for levels in values}
    ranking = Ranking(
        values, ("a",), ids, higher_is_better=True, item_variances=dict.fromkeys(values, variance)
    )
    least = (2 * variance / 2) ** 0.5
    for name, kind in {"b": "tested", "c": "tested", "d": "identical"}.items():
        found = ranking.difference((name,), ("a",))
        assert found.kind == kind
        assert found.standard_error == pytest.approx(least if kind == "tested" else 0.0)
    assert estimate([0.0, 0.0], least_error=least).standard_error == least


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_the_variance_of_a_share_is_never_zero_and_that_of_its_items(share):
    assert share_variance(share, 50) > 0
    assert share_variance(share, 1e9) == pytest.approx(
        share * (1 - share) / 1e9, rel=1e-3, abs=1e-16
    )
    draws = np.random.default_rng(0).binomial(50, share, 20_000) / 50
    assert share_variance(share, 50) > 0.9 * draws.var()


@pytest.mark.parametrize(("share", "spread"), [(0.001, 0.001), (0.1, 0.1), (0.95, 0.01)])
def test_intervals_of_shares_cover_the_truth(share, spread):
    """`python -m tests.studies null_sweeps --only shares` has more of them."""
    kind = Structure(
        ONE_OF_5, 3, items=8000, share=share, spread=spread, effects=(0.02,) * 5, margin=0.02
    )
    _, false, covered = measure(kind, 300, 0)
    assert false <= 0.05 + 3 * (0.05 * 0.95 / 300) ** 0.5
    assert covered >= 0.95 - 3 * (0.05 * 0.95 / 300) ** 0.5
