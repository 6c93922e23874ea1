"""Intervals and comparisons on synthetic timers, whose truth is known."""

import numpy as np
import pytest

from kvlab.benchmark.interleaving import run_interleaved
from kvlab.benchmark.measurement import StopRule
from kvlab.benchmark.timing_statistics import TimingSamples, compare_timings


class Machine:
    """A machine whose speed wanders, with bursts of other work; every variant feels it alike."""

    def __init__(self, seed, noise=0.03, wander=0.05, bursts=0.05):
        self.random = np.random.default_rng(seed)
        self.noise, self.wander, self.bursts = noise, wander, bursts
        self.mood = 0.0

    def variant(self, seconds, steps=16):
        def turn():
            self.mood = 0.8 * self.mood + self.random.normal(0.0, self.wander)
            log_times = self.random.normal(0.0, self.noise, steps) + self.mood
            log_times += np.where(self.random.random(steps) < self.bursts, 1.0, 0.0)
            return {"steps": (seconds * np.exp(log_times)).tolist()}

        return turn


def compared(seed, slowdown, wander=0.05, rule=None):
    machine = Machine(seed, wander=wander)
    works = {"a": machine.variant(0.01), "b": machine.variant(0.01 * slowdown)}
    timed = run_interleaved(works, rule or StopRule())
    return compare_timings(timed.samples["b", "steps"], timed.samples["a", "steps"])


@pytest.mark.parametrize(
    ("wander", "tries"), [(0.05, 40), pytest.param(0.01, 500, marks=pytest.mark.faults)]
)
def test_the_same_variant_twice_is_called_the_same(wander, tries):
    verdicts = [compared(seed, 1.0, wander).verdict for seed in range(tries)]
    assert verdicts.count("same") >= 0.95 * tries


def test_five_percent_slower_is_found():
    comparisons = [compared(seed, 1.05) for seed in range(40)]
    assert [c.verdict for c in comparisons].count("slower") >= 38
    assert np.mean([c.ratio for c in comparisons]) == pytest.approx(1.05, abs=0.005)
    assert np.mean([c.low <= 1.05 <= c.high for c in comparisons]) >= 0.95


def test_what_is_not_told_apart_says_how_much_would_have_been():
    """Eight rounds of this machine: the difference that they say they find is found so often."""
    eight = StopRule(min_rounds=8, max_rounds=8)
    same = [compared(seed, 1.0, rule=eight) for seed in range(100)]
    assert [c.verdict for c in same].count("undecided") >= 95
    least = float(np.median([c.min_detectable for c in same]))
    assert 0.05 < least < 0.2
    verdicts = [compared(seed, 1 + least, rule=eight).verdict for seed in range(100)]
    assert 0.75 <= verdicts.count("slower") / 100 <= 0.995, "about 95 in 100 of known spread"


def test_a_large_difference_needs_no_narrow_interval():
    machine = Machine(1, wander=0.3)
    works = {"a": machine.variant(0.01), "b": machine.variant(0.2)}
    timed = run_interleaved(works, StopRule(relative_error=0.5))
    comparison = compare_timings(timed.samples["b", "steps"], timed.samples["a", "steps"])
    assert comparison.verdict == "slower"
    assert comparison.high / comparison.ratio > 1.1
    assert len(timed.samples["a", "steps"].rounds) < 60


def test_a_few_turns_in_which_something_else_ran_change_little():
    quiet = [[1.0 + 0.001 * (n % 3)] for n in range(20)]
    struck = [*([[30.0]] * 2), *quiet[2:]]
    comparison = compare_timings(TimingSamples(np.array(struck)), TimingSamples(np.array(quiet)))
    assert comparison.verdict == "same"
    assert comparison.ratio == pytest.approx(1.0, abs=0.001)


def test_intervals_hold_the_truth():
    """Of rounds that differ, about 95 of 100 intervals hold the true median."""
    held = 0
    for seed in range(300):
        random = np.random.default_rng(seed)
        moods = random.normal(0.0, 0.1, (20, 1))
        log_times = np.exp(moods + random.normal(0.0, 0.02, (20, 8)))
        middle = TimingSamples(log_times).quantile(0.5)
        held += middle.low <= 1.0 <= middle.high
    assert 270 <= held <= 297


def test_a_steady_time_has_no_error_and_one_round_has_no_estimate():
    steady = TimingSamples(np.full((3, 2), 2.0))
    assert steady.relative_error == 0.0
    assert [quantile.value for quantile in steady.quantiles()] == [2.0, 2.0, 2.0]
    assert TimingSamples(np.full((1, 2), 2.0)).relative_error == float("inf")
    assert compare_timings(steady, steady) is None, "three rounds say nothing"
    assert steady.totals.rounds.tolist() == [[4.0]] * 3


@pytest.mark.parametrize(("noise", "rounds"), [(0.0, 5), (0.5, 30)])
def test_rounds_go_on_until_the_error_is_small(noise, rounds):
    machine = Machine(1, noise=noise, wander=noise, bursts=0.0)
    rule = StopRule(relative_error=0.02, max_rounds=30)
    timed = run_interleaved({"a": machine.variant(0.01)}, rule)
    assert len(timed.samples["a", "steps"].rounds) == rounds


def test_only_the_series_that_are_compared_must_be_settled():
    random = np.random.default_rng(0)

    def work():
        return {"steps": [1.0], "first": [float(np.exp(random.normal(0.0, 0.05)))]}

    works = {"a": work, "b": work}
    rule = StopRule(relative_error=0.5)
    few = run_interleaved(works, rule, compared=("steps",)).samples["a", "first"]
    assert len(few.rounds) == 5
    assert len(run_interleaved(works, rule).samples["a", "first"].rounds) > 20
