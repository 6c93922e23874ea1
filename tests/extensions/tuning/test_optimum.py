"""The best rate from losses at a few rates: against numpy's parabola and planted surfaces."""

import math
import random
import statistics
from functools import partial

import numpy as np
import pytest

from kvlab.extensions.tuning import optimum as tuning
from kvlab.extensions.tuning.optimum import (
    MAX_ADDED,
    TunedPoint,
    find_optimum,
    polish_losses,
    predict_loss,
    propose_value,
)

GRID = (1e-3, 2e-3, 4e-3)


def tune(loss, grid=GRID, seeds=(0,)):
    """Try rates until nothing more is proposed; return the points and the optimum."""
    points = [TunedPoint(rate, {seed: loss(rate, seed) for seed in seeds}) for rate in grid]
    while (rate := propose_value(points, len(grid))) is not None:
        points.append(TunedPoint(rate, {seed: loss(rate, seed) for seed in seeds}))
        points.sort(key=lambda point: point.value)
    return points, find_optimum(points)


def surface(best, steep=1.0, cliff=math.inf):
    def loss(rate, _seed):
        away = math.log(rate / best)
        bend = 0.05 * (steep if away > 0 else 1.0)
        return math.inf if rate > cliff * best else 4.0 + bend * away**2

    return loss


@pytest.mark.parametrize(
    ("steep", "cliff"), [(1.0, math.inf), (2.0, math.inf), (0.5, math.inf), (1.0, 1.5)]
)
@pytest.mark.parametrize("best", [1e-3, 1.7e-3, 2.4e-3, 4e-3])
def test_a_planted_best_rate_is_found_within_15_percent(best, steep, cliff):
    points, optimum = tune(surface(best, steep, cliff))
    assert len(points) <= len(GRID) + MAX_ADDED
    assert optimum.flag == ""
    assert abs(optimum.value / best - 1) < 0.15


def polish(table):
    return polish_losses([TunedPoint(2.0**n, dict(enumerate(row))) for n, row in enumerate(table)])


@pytest.mark.parametrize("seeds", [3, 4, 5])
@pytest.mark.parametrize("shift", [-3.0, 0.1, 50.0])
def test_one_wrong_training_moves_no_difference_of_losses_that_are_a_sum(seeds, shift):
    random = np.random.default_rng(seeds)
    by_value, by_seed = random.normal(4, 0.1, 4), random.normal(0, 0.5, seeds)
    table = by_value[:, None] + by_seed
    table[1, 2] += shift
    assert np.diff(polish(table)) == pytest.approx(np.diff(by_value))


RATES, SEEDS = (4e-3, 8e-3, 16e-3), (100, 101, 102)


def draw_trainings(draw):
    """Return a best rate, and losses that are quadratic in the logarithm of the rate, with noise of
    each training and of each seed; one of the nine may go wrong by 0.1 nats."""
    best = math.exp(draw.uniform(math.log(RATES[0] * 1.1), math.log(RATES[-1] / 1.1)))
    bad, own = (draw.choice(RATES), draw.choice(SEEDS)), {}
    shared = {seed: draw.gauss(0, 0.02) for seed in SEEDS}

    def loss(rate, seed, has_bad):
        noise = own.setdefault((rate, seed), draw.gauss(0, 0.01))
        shift = 0.1 if has_bad and (rate, seed) == bad else 0.0
        return 2.1 + 0.1 * math.log(rate / best) ** 2 + shared[seed] + noise + shift

    return best, loss


def test_one_wrong_training_of_nine_hardly_moves_the_rate(monkeypatch):
    """With means in place of medians it would; and the told error is that of the rate."""
    draw, moved, errors, told = random.Random(0), {"medians": [], "means": []}, [], []
    means = lambda points: [statistics.fmean(one.losses.values()) for one in points]  # noqa: E731
    for _ in range(300):
        best, loss = draw_trainings(draw)
        for name, polish in (("medians", polish_losses), ("means", means)):
            monkeypatch.setattr(tuning, "polish_losses", polish)
            whole, with_bad = (
                tune(partial(loss, has_bad=has_bad), RATES, SEEDS)[1] for has_bad in (False, True)
            )
            moved[name].append(abs(math.log(with_bad.value / whole.value)))
            if name == "medians" and whole.log_error is not None:
                errors.append(math.log(whole.value / best))
                told.append(whole.log_error)
    tenth = {name: math.expm1(np.quantile(own, 0.9)) for name, own in moved.items()}
    assert tenth["medians"] < 0.12
    assert tenth["means"] > 0.2
    assert 0.95 < (np.mean(np.square(told)) / np.mean(np.square(errors))) ** 0.5 < 1.25


@pytest.mark.parametrize("best", [2e-3, 4e-3])
def test_a_rate_at_which_one_of_three_diverges_is_never_chosen(best):
    def loss(rate, seed):
        return math.inf if rate > 3e-3 and seed == 1 else surface(best)(rate, seed)

    points, optimum = tune(loss, seeds=(0, 1, 2))
    unsafe = [point.value for point in points if math.inf in point.losses.values()]
    assert unsafe
    assert optimum.value < min(unsafe)


def test_the_loss_at_another_rate_is_on_the_parabola_through_the_three_nearest():
    losses = {1e-3: 4.3, 2e-3: 4.1, 4e-3: 4.0, 8e-3: 4.2, 16e-3: math.inf}
    points = [TunedPoint(rate, {0: loss}) for rate, loss in losses.items()]
    for rate, nearest in ((5e-3, (2e-3, 4e-3, 8e-3)), (1.2e-3, (1e-3, 2e-3, 4e-3))):
        fit = np.polyfit(np.log(nearest), [losses[one] for one in nearest], 2)
        assert predict_loss(points, rate) == pytest.approx(np.polyval(fit, math.log(rate)))
    assert predict_loss(points, 12e-3) == math.inf
    assert predict_loss(points, 0.8e-3) is not None
    assert predict_loss(points, 0.6e-3) is None  # more than half a step below what was tried
    assert predict_loss(points[:2] + points[4:], 1.5e-3) is None


def test_what_failed_is_left_out_and_without_a_common_seed_there_is_no_best():
    loss = surface(2e-3)
    points = [TunedPoint(rate, {0: loss(rate, 0), 1: loss(rate, 1)}) for rate in GRID]
    del points[0].losses[1]
    assert find_optimum(points).value == 2e-3
    assert find_optimum(points).log_error is None
    del points[1].losses[0]
    assert find_optimum(points).flag == "failed"
    assert propose_value(points, len(GRID)) is None


def test_the_vertex_is_that_of_a_fitted_parabola():
    draw = random.Random(0)
    for _ in range(50):
        rates = sorted(math.exp(draw.uniform(-8, -4)) for _ in range(3))
        losses = [4 + draw.random(), 4.0, 4 + draw.random()]
        a, b, c = np.polyfit(np.log(rates), losses, 2)
        optimum = find_optimum([TunedPoint(r, {0: y}) for r, y in zip(rates, losses, strict=True)])
        assert optimum.value == pytest.approx(math.exp(-b / (2 * a)), rel=6e-3)
        assert optimum.loss == pytest.approx(c - b * b / (4 * a))
        assert optimum.log_error is None
