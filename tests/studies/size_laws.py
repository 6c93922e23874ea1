"""Coverage of `kvlab.analysis.scaling` over synthetic laws of size.

    python -m tests.studies size_laws [--sweeps 2000]

Every law is a straight line of log10 N plus noise. Printed are the shares of sweeps in which an
interval covers the truth: that of the slope, that of the line at ten times the largest size, and
that of the prediction there, for the mean difference over as many new seeds.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from kvlab.analysis.scaling import SizeLaw
from kvlab.analysis.statistics import estimate
from tests.studies import read_options

INTERCEPT, SLOPE = 0.08, -0.02


@dataclass(frozen=True)
class Noise:
    """Standard deviations of a synthetic sweep, in nats.

    Attributes:
        seed: What a level does at a seed at every size (level x seed).
        slope: What it does per tenfold size at a seed (level x seed x size).
        training: Of each pair of trainings.
        heavy: Whether that has heavy tails (Student's t of 4 degrees of freedom).
    """

    seed: float = 0.0
    slope: float = 0.0
    training: float = 0.01
    heavy: bool = False


NOISES = {
    "level x seed": Noise(seed=0.01),
    "mostly level x seed": Noise(seed=0.02, training=0.005),
    "level x seed x size": Noise(seed=0.01, slope=0.005, training=0.005),
    "trainings alone": Noise(),
    "heavy tails": Noise(seed=0.01, heavy=True),
}


def draw_law(
    rng: np.random.Generator, noise: Noise, seeds: int, sizes: int, spacing: float = 0.5
) -> tuple[SizeLaw, float]:
    """Return a law fitted to a synthetic sweep, and the mean of as many new seeds at ten times."""
    logs = 6.0 + spacing * np.arange(sizes)
    at = np.append(logs, logs[-1] + 1)
    both = [_draw_differences(rng, noise, seeds, at) for _ in range(2)]
    rows = tuple(tuple(map(float, row[:-1])) for row in both[0])
    return SizeLaw(tuple(float(10**log) for log in logs), rows), float(both[1][:, -1].mean())


def _draw_differences(rng, noise, seeds, logs):
    own, slopes = (rng.normal(0, spread, (seeds, 1)) for spread in (noise.seed, noise.slope))
    lines = own + slopes * (logs - logs[:-1].mean())
    shape = (seeds, len(logs))
    draws = rng.standard_t(4, shape) / 2**0.5 if noise.heavy else rng.normal(size=shape)
    return INTERCEPT + SLOPE * (logs - 6.0) + lines + noise.training * draws


def cover(rng: np.random.Generator, noise: Noise, seeds: int, sizes: int) -> tuple[bool, ...]:
    """Return whether the slope's, the line's and the prediction's interval cover the truth."""
    law, new_mean = draw_law(rng, noise, seeds, sizes)
    target = 10 * law.parameters[-1]
    slope, line, predicted = estimate(law.slopes), law.line(target), law.predict(target)
    truth = INTERCEPT + SLOPE * (np.log10(target) - 6.0)
    return (
        slope.low <= SLOPE <= slope.high,
        line.low <= truth <= line.high,
        predicted.low <= new_mean <= predicted.high,
    )


def coverage(noise: Noise, seeds: int, sizes: int, sweeps: int) -> tuple[float, ...]:
    """Return the shares of ``sweeps`` in which slope, line and prediction are covered."""
    rng = np.random.default_rng([seeds, sizes, sweeps])
    covered = [cover(rng, noise, seeds, sizes) for _ in range(sweeps)]
    return tuple(float(share) for share in np.mean(covered, axis=0))


def main() -> None:
    sweeps = read_options(__doc__, sweeps=2000).sweeps
    print(f"{'noise':22s} {'seeds':>5s} {'sizes':>5s} {'slope':>7s} {'line':>7s} {'predicted':>9s}")
    for name, seeds, sizes in itertools.product(NOISES, (2, 3, 5), (3, 5)):
        slope, line, new = coverage(NOISES[name], seeds, sizes, sweeps)
        row = f"{name:22s} {seeds:5d} {sizes:5d} {slope:7.1%} {line:7.1%} {new:9.1%}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
