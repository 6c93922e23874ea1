"""What pairing by seeds, and more seeds for the reference, do to the intervals of cells.

    python -m tests.null_pairing [SWEEPS]

Simulates cells that are compared with one reference and do not differ from it. For each structure
of noise it prints how often any simultaneous interval excludes zero, with its standard error, and
the median half width in spreads of a training: with the errors that the seeds ask for, with those
of differences within a seed alone, and with the trainings of one seed of all cells given to the
reference instead.
"""

import sys
from collections.abc import Callable, Sequence

import numpy as np

from kvlab.analysis.standard_errors import PooledVariance, StandardError, pool_variance
from kvlab.analysis.verdicts import judge_family

ALPHA = 0.05

Trainings = list[np.ndarray]
"""Losses of each cell's trainings, the reference's first; in the order of their seeds."""

STRUCTURES: dict[str, Callable[[int], tuple[list[float], float]]] = {
    "equal": lambda cells: ([1.0] * (cells + 1), 0.0),
    "seeds explain a fifth": lambda cells: ([1.0] * (cells + 1), 0.5),
    "seeds explain half": lambda cells: ([1.0] * (cells + 1), 1.0),
    "seeds explain most": lambda cells: ([1.0] * (cells + 1), 2.0),
    "one cell 3 times as noisy": lambda cells: ([1.0] * cells + [3.0], 0.0),
    "one cell 10 times as noisy": lambda cells: ([1.0] * cells + [10.0], 0.0),
    "half of the cells twice as noisy": lambda cells: (
        [1.0] * (cells + 1 - cells // 2) + [2.0] * (cells // 2),
        0.0,
    ),
    "reference twice as noisy": lambda cells: ([2.0] + [1.0] * cells, 0.0),
    "reference 4 times as noisy": lambda cells: ([4.0] + [1.0] * cells, 0.0),
}
"""Structure -> spread of each cell's trainings, and of what all cells share at a seed."""


def main(sweeps: int) -> None:
    for cells, seeds in ((8, 3), (8, 5), (4, 3)):
        print(f"{cells} cells, {seeds} seeds; {sweeps} sweeps each")
        fewer = seeds - 1
        for name, structure in STRUCTURES.items():
            spreads, shared = structure(cells)
            equal, moved = [seeds] * (cells + 1), [seeds + cells] + [fewer] * cells
            rows = [
                simulate(sweeps, spreads, shared, equal, judge_by_the_rule),
                simulate(sweeps, spreads, shared, equal, judge_within_seeds),
                simulate(sweeps, spreads, shared, moved, judge_unpaired),
            ]
            text = "   ".join(f"{e:6.2%} ± {s:.2%} {half:6.2f}" for e, s, half in rows)
            print(f"  {name:34} {text}", flush=True)


def simulate(
    sweeps: int,
    spreads: Sequence[float],
    shared: float,
    seeds: Sequence[int],
    judge: Callable[[Trainings], list[tuple[float, StandardError]]],
) -> tuple[float, float, float]:
    """Return the share of sweeps with a false interval, its error, and the median half width."""
    random, wrong, halves = np.random.default_rng(1), 0, []
    for _ in range(sweeps):
        common = random.normal(0.0, shared, max(seeds))
        trainings = [
            random.normal(0.0, spread, count) + common[:count]
            for spread, count in zip(spreads, seeds, strict=True)
        ]
        values, errors = zip(*judge(trainings), strict=True)
        tests = judge_family(values, errors, ALPHA, None, [1 / len(values)] * len(values))
        wrong += any(test.low > 0 or test.high < 0 for test in tests)
        halves += [(test.high - test.low) / 2 for test in tests]
    rate = wrong / sweeps
    return rate, (rate * (1 - rate) / sweeps) ** 0.5, float(np.median(halves))


def judge_by_the_rule(trainings: Trainings) -> list[tuple[float, StandardError]]:
    """Judge paired differences with the errors of reports."""
    return _judge(*_pool(trainings))


def judge_within_seeds(trainings: Trainings) -> list[tuple[float, StandardError]]:
    """Judge paired differences with the errors of differences within a seed."""
    common = np.random.default_rng(0).normal(0.0, 1e6, len(trainings[0]))
    differences, pooled = _pool([row + common for row in trainings])  # so much is always found
    assert pooled.is_paired
    return _judge(differences, pooled)


def judge_unpaired(trainings: Trainings) -> list[tuple[float, StandardError]]:
    """Judge differences of means: the larger of Welch's error and the pooled one."""
    counts = np.array([len(row) for row in trainings])
    variances = np.array([row.var(ddof=1) for row in trainings])
    shares = np.array([1 / 2, *[1 / (len(trainings) - 1) / 2] * (len(trainings) - 1)])
    parts = shares * variances
    pooled = parts.sum()
    freedoms = [one.sum() ** 2 / (one**2 / (counts - 1)).sum() for one in (shares, parts)]
    pooled_df = min(freedoms)
    found = []
    for number in range(1, len(trainings)):
        ends = [0, number]
        parts = variances[ends] / counts[ends]
        own, of_pool = parts.sum(), pooled * (1 / counts[ends]).sum()
        df = pooled_df
        if own > of_pool:
            welch = own**2 / (parts**2 / (counts[ends] - 1)).sum()
            df = (welch * pooled_df) ** 0.5
        error = StandardError(float(max(own, of_pool) ** 0.5), float(df))
        found.append((float(trainings[number].mean() - trainings[0].mean()), error))
    return found


def _pool(trainings: Trainings) -> tuple[list[dict[int, float]], PooledVariance[int]]:
    rows = {n: dict(enumerate(row.tolist())) for n, row in enumerate(trainings)}
    differences = [dict(enumerate((row - trainings[0]).tolist())) for row in trainings[1:]]
    weights = [{n: 1.0, 0: -1.0} for n in range(1, len(trainings))]
    return differences, pool_variance(differences, weights, rows)


def _judge(
    differences: list[dict[int, float]], pooled: PooledVariance[int]
) -> list[tuple[float, StandardError]]:
    found = []
    for number, one in enumerate(differences, start=1):
        values = np.array(list(one.values()))
        error = pooled.error({number: 1.0, 0: -1.0}, float(values.var(ddof=1)), len(values))
        found.append((float(values.mean()), error))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
