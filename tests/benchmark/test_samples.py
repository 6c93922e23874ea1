"""Intervals and comparisons on synthetic timers, whose truth is known."""

import numpy as np
import pytest

from kvlab.benchmark.interleave import StopRule, interleave
from kvlab.benchmark.samples import Samples, compare


class Machine:
    """A machine whose speed wanders, with bursts of other work; every variant feels it alike."""

    def __init__(self, seed, noise=0.03, wander=0.05, bursts=0.05):
        self.random = np.random.default_rng(seed)
        self.noise, self.wander, self.bursts = noise, wander, bursts
        self.mood = 0.0

    def variant(self, seconds, steps=16):
        def turn():
            self.mood = 0.8 * self.mood + self.random.normal(0.0, self.wander)
            drawn = self.random.normal(0.0, self.noise, steps) + self.mood
            drawn += np.where(self.random.random(steps) < self.bursts, 1.0, 0.0)
            return {"steps": (seconds * np.exp(drawn)).tolist()}

        return turn


def compared(machine, slowdown, rounds):
    works = {"a": machine.variant(0.01), "b": machine.variant(0.01 * slowdown)}
    timed = interleave(works, StopRule(least=rounds, most=rounds))
    return compare(timed.samples["b", "steps"], timed.samples["a", "steps"])


@pytest.mark.parametrize("rounds", [5, 12])
def test_the_same_variant_twice_is_not_called_different(rounds):
    verdicts = [compared(Machine(seed), 1.0, rounds).verdict for seed in range(200)]
    assert verdicts.count("same") >= 190, "95 in 100"


def test_five_percent_slower_is_found():
    quiet = [compared(Machine(seed, wander=0.01), 1.05, 12) for seed in range(50)]
    assert [found.verdict for found in quiet].count("slower") >= 48
    assert np.mean([found.ratio for found in quiet]) == pytest.approx(1.05, abs=0.005)


def test_on_a_wandering_machine_more_rounds_find_it():
    found = [compared(Machine(seed), 1.05, 60).verdict for seed in range(50)]
    assert found.count("slower") >= 45
    assert "faster" not in found


def test_too_few_rounds_say_nothing():
    three = Samples.of([[1.0], [1.0], [1.0]])
    assert compare(three, three) is None


def test_intervals_hold_the_truth():
    """Of rounds that differ, about 95 of 100 intervals hold the true median."""
    held = 0
    for seed in range(300):
        random = np.random.default_rng(seed)
        moods = random.normal(0.0, 0.1, (20, 1))
        drawn = np.exp(moods + random.normal(0.0, 0.02, (20, 8)))
        middle = Samples(drawn).quantile(0.5)
        held += middle.low <= 1.0 <= middle.high
    assert 270 <= held <= 297


def test_a_steady_time_has_no_error_and_one_round_has_no_estimate():
    steady = Samples.of([[2.0, 2.0]] * 3)
    assert steady.relative_error == 0.0
    assert [quantile.value for quantile in steady.quantiles()] == [2.0, 2.0, 2.0]
    assert Samples.of([[2.0, 2.0]]).relative_error == float("inf")
    assert steady.totals.rounds.tolist() == [[4.0]] * 3


def test_variants_take_turns_in_turning_order():
    order = []

    def work(name):
        def turn():
            order.append(name)
            return {"steps": [1.0]}

        return turn

    interleave({"a": work("a"), "b": work("b")}, StopRule(least=3, most=3))
    assert "".join(order) == "ab" + "ab" + "ba" + "ab", "the first turns warm up"


@pytest.mark.parametrize(("noise", "rounds"), [(0.0, 5), (0.5, 30)])
def test_rounds_go_on_until_the_error_is_small(noise, rounds):
    machine = Machine(1, noise=noise, wander=noise, bursts=0.0)
    timed = interleave({"a": machine.variant(0.01)}, StopRule(relative_error=0.02))
    assert len(timed.samples["a", "steps"].rounds) == rounds


def test_no_round_begins_after_the_time_is_over():
    machine = Machine(1, noise=0.5)
    rule = StopRule(relative_error=1e-9, least=5, most=30, seconds=0.0)
    assert len(interleave({"a": machine.variant(0.01)}, rule).samples["a", "steps"].rounds) == 5
