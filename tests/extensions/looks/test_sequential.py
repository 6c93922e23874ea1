"""Bounds of looks against plain simulation, and what a look decides."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.analysis.verdicts import DIFFERENT
from kvlab.extensions.looks.sequential import (
    ClaimState,
    Looks,
    repeated_p_value,
    repeated_test_error,
    spent_alpha,
    t_bounds,
)
from tests.extensions.looks.null_sweeps import LOOKED, look

SIZES = (3, 5, 7, 10)


def t_statistics(values, sizes):
    """Return the t statistic of each column after each of these numbers of rows."""
    return np.array([values[:n].mean(0) / values[:n].std(0, ddof=1) * n**0.5 for n in sizes])


def look_by_look(sizes, differences, looks=None, **options):
    """Take all looks at one family; return the states after each."""
    looks = looks or Looks(sizes, len(differences), **options)
    states, history = {name: ClaimState() for name in differences}, []
    for size in sizes:
        states = looks.take(states, {name: d[:size] for name, d in differences.items()})
        history.append(states)
    return history


def test_the_bounds_of_four_looks_are_those_of_the_t_statistic():
    assert t_bounds(SIZES, 10, 0.05) == pytest.approx((53.77, 5.52, 3.35, 2.41), rel=2e-3)


@pytest.mark.parametrize("alpha", [0.05, 0.0005])
@pytest.mark.parametrize("sizes", [(2, 1000), (4, 5, 1000), (2, 3, 4, 1000)])
def test_a_look_at_hardly_any_of_many_seeds_calls_nothing(sizes, alpha):
    """The error that it may spend is too small for a float, or for the quantiles of SciPy."""
    assert min(t_bounds(sizes, sizes[-1], alpha)[:-1]) > 1e6
    [_, state] = look_by_look(sizes[:2], {"a": [0.1, 0.11, 0.12, 0.1, 0.11]}, Looks(sizes, 1))
    assert (state["a"].outcome, state["a"].is_open) == ("", True)


@pytest.mark.parametrize(("sizes", "alpha"), [(SIZES, 0.05), ((2, 4, 8), 0.02), ((5, 6), 0.1)])
def test_the_looks_spend_the_error_that_is_declared(sizes, alpha):
    values = np.random.default_rng(1).standard_normal((sizes[-1], 200_000))
    crossed = np.zeros(values.shape[1], dtype=bool)
    bounds = t_bounds(sizes, sizes[-1], alpha)
    for size, bound, t in zip(sizes, bounds, t_statistics(values, sizes), strict=True):
        crossed |= abs(t) >= bound
        spent = spent_alpha(size / sizes[-1], alpha)
        assert crossed.mean() == pytest.approx(spent, abs=4 * (spent / values.shape[1]) ** 0.5)
    assert spent == pytest.approx(alpha)


def test_the_same_level_at_every_look_errs_in_15_percent():
    assert repeated_test_error((2, 3, 5, 10)) == pytest.approx(0.154, abs=0.005)
    assert repeated_test_error((10,)) == pytest.approx(0.05, abs=0.004)


def test_a_repeated_p_value_is_the_level_whose_bound_is_reached():
    level = repeated_p_value(ClaimState(sizes=(3, 5, 7), value=1.0, error=0.3), 10)
    assert t_bounds((3, 5, 7), 10, level)[-1] == pytest.approx(1 / 0.3, rel=0.01)


def test_what_is_decided_passes_its_error_on():
    """A borderline claim is rejected at alpha once the other is, but not at alpha / 2."""
    clear = [1.0 + 0.01 * n for n in range(10)]
    pattern = np.array([1.0, -1.0] * 5)
    t = 2.6  # between the last bounds at level 0.05 and 0.025
    border = (t * pattern.std(ddof=1) / 10**0.5 + pattern).tolist()
    alone = look_by_look(SIZES, {"border": border, "null": pattern.tolist()})[-1]
    beside = look_by_look(SIZES, {"border": border, "clear": clear})[-1]
    assert not alone["border"].outcome
    assert alone["border"].low < 0 < alone["border"].high
    assert (beside["border"].outcome, beside["border"].level) == ("worse", 0.05)
    assert beside["border"].low == 0.0, "Bonferroni's interval covers zero: it is cut there"


def test_a_found_difference_keeps_half_its_error_if_it_might_have_been_called_small():
    clear = [1.0 + 0.01 * n for n in range(10)]
    noise = {"clear": clear, "null": [1.0, -1.0] * 5}
    assert look_by_look(SIZES, noise)[-1]["null"].level == pytest.approx(0.05)
    assert look_by_look(SIZES, noise, margin=0.2)[-1]["null"].level == pytest.approx(0.0375)


def test_an_interval_below_the_margin_is_bounded_at_an_interim_look():
    close = [0.001, -0.001] * 5
    states = look_by_look(SIZES, {"close": close}, margin=0.02)
    first = next(number for number, one in enumerate(states) if one["close"].outcome)
    assert (states[first]["close"].outcome, first) == ("bounded", 1)
    assert states[first]["close"].low < 0 < states[first]["close"].high < 0.02
    assert states[-1]["close"] == states[first]["close"], "a decision is final"


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([None, 0.5, 3.0]), st.floats(0, 3))
def test_an_interval_excludes_zero_if_and_only_if_a_difference_is_called(
    seed, claims, margin, effect
):
    random = np.random.default_rng(seed)
    differences = {f"c{n}": random.normal(effect * n, 1, 10).tolist() for n in range(claims)}
    for states in look_by_look(SIZES, differences, margin=margin):
        for state in states.values():
            covers_zero = state.low < 0 < state.high
            assert covers_zero == (state.outcome not in DIFFERENT)
            if margin is not None:
                is_small = state.outcome in ("bounded", "worse within", "better")
                assert is_small == (state.high < margin)
            assert ClaimState.from_json(state.to_json()) == state


def test_a_claim_with_failed_trials_goes_on_with_the_seeds_that_it_has():
    looks = Looks(SIZES, 1)
    values = [0.5, 0.7, 0.4, 0.6, 0.9, 0.5, 0.6, 0.4, 0.8]
    states = {"one": ClaimState()}
    for count in (1, 4, 4, 9):
        states = looks.take(states, {"one": values[:count]})
    assert states["one"].sizes == (4, 9), "no look without a new seed, none with one seed"
    assert states["one"].bound == t_bounds((4, 9), 10, 0.05)[-1] > t_bounds(SIZES, 10, 0.05)[-1]


def test_a_claim_without_any_pair_is_given_up_and_equal_cells_are_identical():
    states = Looks(SIZES, 2).take(
        {"gone": ClaimState(), "same": ClaimState()}, {"gone": [], "same": [0.0, 0.0, 0.0]}
    )
    assert (states["gone"].outcome, states["gone"].is_open) == ("", False)
    assert states["same"].outcome == "identical"


def test_nothing_is_given_up_before_half_of_the_seeds():
    null = [1.0, -1.0, 0.01] * 4
    opened = [states["null"].is_open for states in look_by_look(SIZES, {"null": null[:10]})]
    assert opened == [True, False, False, False]


def test_a_claim_about_a_share_has_no_smaller_error_than_its_items_give():
    looks = Looks((3, 5), 1, margin=0.02, better="higher")
    for error, outcome in ((1e-4, "bounded"), (0.1, "")):
        after = looks.take({"f=l": ClaimState()}, {"f=l": [0.0] * 3}, least_errors={"f=l": error})
        assert after["f=l"].outcome == outcome
    assert looks.take({"f=l": ClaimState()}, {"f=l": [0.0] * 3})["f=l"].outcome == "identical"


@pytest.mark.parametrize("name", ["5 nulls", "4 at the margin, 1 null"])
def test_a_sweep_with_looks_keeps_its_error(name):
    sweeps = 300
    slack = 3 * (0.05 * 0.95 / sweeps) ** 0.5  # three Monte Carlo errors
    tally = look(LOOKED[name], sweeps)
    assert tally.error <= 0.05 + slack
    assert tally.coverage >= 0.95 - slack
    assert tally.trials < 0.95


def test_looks_find_nearly_what_the_most_seeds_find_with_fewer():
    tally = look(LOOKED["5 of 3"], 50)
    assert tally.power > 0.98
    assert tally.trials < 0.8
