"""Tune rates where one training goes wrong: how far the rate moves.

    python -m tests.studies null_tuning [--sweeps 2000]

Losses are quadratic in the logarithm of the rate (0.1 nats at a factor e, as in twelve-layers) with
noise of a training and of a seed, at three rates and three seeds. They are tuned as they are, and
with 0.1 nats added to one of the nine trainings. Printed are how far that moves the rate, with
medians and with means over seeds in place of `polish_losses`, what the rate is off by, and what its
standard error tells.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest import mock

from kvlab.analysis import tuning
from kvlab.analysis.tuning import Optimum, TunedPoint, find_optimum, propose_value
from tests.studies import read_options

GRID = (4e-3, 8e-3, 16e-3)
SEEDS = (100, 101, 102)
CURVATURE, SEED_SPREAD, SHIFT = 0.1, 0.02, 0.1
NOISES = (0.005, 0.01, 0.02)
"""Deviations of a training from others at its seed and rate, in nats."""


def average_losses(points: Sequence[TunedPoint]) -> list[float]:
    """Return the mean loss at each value, as rates were tuned before."""
    return [statistics.fmean(point.losses.values()) for point in points]


@dataclass
class Moves:
    """Natural logarithms of rates.

    Attributes:
        moved: How far one bad training moved each rate.
        errors: What each rate was off by without it.
        told: Standard errors that were told without it.
    """

    moved: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)

    def tenth(self) -> float:
        """Return what a tenth of the moves exceed, as a share of the rate."""
        return math.expm1(statistics.quantiles(self.moved, n=10)[-1])

    def honesty(self) -> float:
        """Return the told errors over the true ones."""
        return _root_mean_square(self.told) / _root_mean_square(self.errors)


class Trainings:
    """Losses of the trainings of one sweep by rate and seed: the same however often they are asked."""

    def __init__(self, draw: random.Random, noise: float):
        self.best = math.exp(draw.uniform(math.log(GRID[0] * 1.1), math.log(GRID[-1] / 1.1)))
        self._bad = (draw.choice(GRID), draw.choice(SEEDS))
        self._shared = {seed: draw.gauss(0, SEED_SPREAD) for seed in SEEDS}
        self._own: dict[tuple[float, int], float] = {}
        self._draw, self._noise = draw, noise

    def tune(self, *, has_bad: bool) -> Optimum:
        """Try rates until nothing more is proposed; return the best."""
        points = [self._point(rate, has_bad) for rate in GRID]
        while (rate := propose_value(points, len(GRID))) is not None:
            points = sorted([*points, self._point(rate, has_bad)], key=lambda point: point.value)
        return find_optimum(points)

    def _point(self, rate: float, has_bad: bool) -> TunedPoint:
        losses = {}
        for seed in SEEDS:
            own = self._own.setdefault((rate, seed), self._draw.gauss(0, self._noise))
            shift = SHIFT if has_bad and (rate, seed) == self._bad else 0.0
            away = math.log(rate / self.best)
            losses[seed] = 2.1 + CURVATURE * away**2 + self._shared[seed] + own + shift
        return TunedPoint(rate, losses)


def simulate(noise: float, sweeps: int) -> dict[str, Moves]:
    """Return the moves by medians and by means, of the same losses."""
    draw, found = random.Random(0), {"medians": Moves(), "means": Moves()}
    for _ in range(sweeps):
        trainings = Trainings(draw, noise)
        for name, moves in found.items():
            losses = tuning.polish_losses if name == "medians" else average_losses
            with mock.patch.object(tuning, "polish_losses", losses):
                planted, with_bad = (trainings.tune(has_bad=has_bad) for has_bad in (False, True))
            moves.moved.append(abs(math.log(with_bad.value / planted.value)))
            if planted.log_error is not None:
                moves.errors.append(math.log(planted.value / trainings.best))
                moves.told.append(planted.log_error)
    return found


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values))


def main() -> None:
    sweeps = read_options(__doc__, sweeps=2000).sweeps
    print("| noise of a training | by | moved: median | 9 of 10 | off by | told |")
    for noise in NOISES:
        for name, moves in simulate(noise, sweeps).items():
            median = math.expm1(statistics.median(moves.moved))
            off, told = _root_mean_square(moves.errors), _root_mean_square(moves.told)
            shares = (median, moves.tenth(), off, told)
            print(f"| {noise} | {name} | {' | '.join(f'{share:.1%}' for share in shares)} |")


if __name__ == "__main__":
    main()
