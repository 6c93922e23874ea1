"""Serving gaps: exact sign flips over trainings, of several cells together."""

import itertools

import numpy as np
import pytest

from kvlab.analysis.serving_gaps import fewest_trainings, joint_sign_flip_test, judge_gaps
from kvlab.analysis.statistics import sign_flip_test


def brute_force(rows):
    """Every pattern of signs of every seed, row by row."""
    seeds = sorted({seed for row in rows for seed in row})

    def size(row, signs):
        total = sum(signs[seeds.index(seed)] * value for seed, value in row.items())
        return abs(total) / sum(value**2 for value in row.values()) ** 0.5

    patterns = list(itertools.product((-1, 1), repeat=len(seeds)))
    largest = [max(size(row, signs) for row in rows) for signs in patterns]
    ones = [1] * len(seeds)
    return [np.mean([one >= size(row, ones) - 1e-12 for one in largest]) for row in rows]


def test_by_brute_force():
    random = np.random.default_rng(1)
    rows = [dict(enumerate(random.exponential(size=6) - 0.3)) for _ in range(4)]
    del rows[1][2], rows[3][5]
    found = joint_sign_flip_test(rows)
    assert [p for p, _ in found] == pytest.approx(brute_force(rows))
    alone = [brute_force([row])[0] for row in rows]
    assert [own for _, own in found] == pytest.approx(alone)


def test_one_row_is_the_sign_flip_test():
    values = np.random.default_rng(2).normal(0.5, 1, 9)
    p = sign_flip_test(values.tolist())
    assert joint_sign_flip_test([dict(enumerate(values))]) == [(p, p)]


def test_many_seeds_are_sampled_and_repeatable():
    values = np.random.default_rng(3).normal(0.4, 1, (2, 30))
    rows = [dict(enumerate(row)) for row in values]
    found = joint_sign_flip_test(rows)
    assert found == joint_sign_flip_test(rows)
    alone = [sign_flip_test(row.tolist()) for row in values]
    assert all(one <= both + 0.005 for one, (both, _) in zip(alone, found, strict=True))


def test_five_trainings_are_too_few_and_six_are_enough():
    assert [fewest_trainings(alpha) for alpha in (0.05, 0.01, 0.2)] == [6, 8, 4]
    for count, called in ((5, False), (6, True)):
        gaps = judge_gaps([dict.fromkeys(range(count), 0.02), {0: 1e-5, 1: 1e-5}], 0.05, 1e-4)
        assert gaps[0].can_be_found == gaps[0].is_found == called
        assert gaps[0].p == 2.0 ** (1 - count)
        assert (gaps[1].p, gaps[1].is_found) == (1.0, False)


def test_a_gap_that_passes_alone_and_not_among_all_cells_is_suggestive():
    random = np.random.default_rng(6)
    noise = [dict(enumerate(random.normal(0, 0.02, 7))) for _ in range(20)]
    clear = {0: 0.01, 1: 0.02, 2: 0.01, 3: 0.03, 4: 0.02, 5: 0.01, 6: -0.004}
    gap, *_ = judge_gaps([clear, *noise], 0.05, 1e-4)
    assert gap.own_p == pytest.approx(4 / 2**7)
    assert gap.p > 0.05
    assert gap.is_suggestive
    assert not gap.is_found
    (alone,) = judge_gaps([clear], 0.05, 1e-4)
    assert alone.is_found
    assert not alone.is_suggestive


def test_skewed_gaps_around_zero_are_called_rarely():
    """Symmetric with heavy tails, correlated between cells: of 400 sweeps 5% are 20."""
    random = np.random.default_rng(5)
    wrong = 0
    for _ in range(400):
        shared = random.standard_t(2, size=7)
        gaps = shared * random.exponential(size=(5, 7)) + 0.1 * random.standard_t(2, size=(5, 7))
        wrong += any(
            one.is_found for one in judge_gaps([dict(enumerate(g)) for g in gaps], 0.05, 0.0)
        )
    assert wrong <= 29  # two standard errors above 20
