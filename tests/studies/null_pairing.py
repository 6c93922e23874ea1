"""What the rule for pairing by seeds, and more seeds of the baseline, do to errors and intervals.

`python -m tests.studies.null_pairing` simulates sweeps whose levels do nothing, with arrays of all sweeps at
once; `tests/analysis/test_null_pairing.py` holds that against `kvlab.analysis.standard_errors`. For
each structure it prints how often any simultaneous interval excludes zero and the median half width
in spreads of a training, by the rule and with differences within a seed always. Then it prints the
same of one reference and other cells, with equal seeds and with seeds moved to the reference.
"""

import itertools
from collections.abc import Callable

import numpy as np
from scipy import stats

from kvlab.analysis.standard_errors import SEED_ALPHA, can_give_up_pairs
from tests.studies import read_options

Array = np.ndarray
ALPHA = 0.05


def one_factor(count: int) -> tuple[Array, Array]:
    """Return levels by cell, and weights by effect and cell, of levels beside one baseline."""
    levels = np.vstack([np.zeros(count), np.eye(count)])
    return levels, np.hstack([-np.ones((count, 1)), np.eye(count)])


def three_factors() -> tuple[Array, Array]:
    """Return the same of the full design of two factors with two levels and one with three."""
    cells = np.array(list(itertools.product((0, 1), (0, 1), (0, 1, 2))))
    changes = ((0, 1), (1, 1), (2, 1), (2, 2))
    levels = np.stack([cells[:, f] == level for f, level in changes], axis=1).astype(float)
    base = np.stack([cells[:, f] == 0 for f, _ in changes], axis=1)
    return levels, ((levels - base) / levels.sum(axis=0)).T


DESIGNS = {
    "1 level": one_factor(1),
    "2 levels of one factor": one_factor(2),
    "3 levels of one factor": one_factor(3),
    "5 levels of one factor": one_factor(5),
    "18 levels of one factor": one_factor(18),
    "4 levels of three factors": three_factors(),
}

Shape = tuple[int, int, int]
Noise = Callable[[np.random.Generator, Array, Shape], Array]
"""``(random, levels by cell, shape)`` to the noise of trainings (sweeps, cells, seeds)."""


def scaled(factor: float, place: int) -> Noise:
    """Return noise that is larger in one cell."""

    def draw(random: np.random.Generator, levels: Array, shape: Shape) -> Array:
        scales = np.ones(len(levels))
        scales[place] = factor
        return random.normal(size=shape) * scales[:, None]

    return draw


def skewed(random: np.random.Generator, _levels: Array, shape: Shape) -> Array:
    return random.exponential(size=shape)


def noisy_level(random: np.random.Generator, levels: Array, shape: Shape) -> Array:
    return random.normal(size=shape) * (1 + 9 * levels[:, 0])[:, None]


def level_by_seed(random: np.random.Generator, levels: Array, shape: Shape) -> Array:
    together = random.normal(size=(shape[0], levels.shape[1], shape[2]))
    return random.normal(size=shape) + np.einsum("cl,xls->xcs", levels, together)


NOISES: dict[str, Noise] = {
    "alike": scaled(1, 0),
    "skewed": skewed,
    "a cell 10 times": scaled(10, -1),
    "a level 10 times": noisy_level,
    "baseline 3 times": scaled(3, 0),
    "baseline 10 times": scaled(10, 0),
    "levels by seed": level_by_seed,
}


def find_errors(values: Array, weights: Array, *, by_rule: bool = True) -> tuple[Array, Array]:
    """Return the variances of mean differences and their degrees of freedom (sweeps, effects).

    Args:
        values: Losses (sweeps, cells, seeds).
        weights: Weights by effect and cell.
        by_rule: Whether pairing is used only where the F test finds it; else always.
    """
    cells, seeds = values.shape[1:]
    lengths = (weights**2).sum(axis=1)
    within = values - values.mean(axis=2, keepdims=True)
    left = within - within.mean(axis=1, keepdims=True)
    own = np.einsum("kc,xcs->xks", weights, values).var(axis=2, ddof=1)
    unit = weights / np.sqrt(lengths)[:, None]
    freedoms = []
    for noise in (np.ones((1, cells)), (left**2).sum(axis=2)):
        covariance = np.einsum("kc,xc,jc->xkj", unit, noise, unit)
        trace = np.einsum("xkk->x", covariance)
        freedoms.append((seeds - 1) * trace**2 / (covariance**2).sum(axis=(1, 2)))
    pooled, df = (own / lengths).mean(axis=1)[:, None] * lengths, np.minimum(*freedoms)[:, None]
    own_df = np.ones_like(df) if seeds == 2 else np.sqrt(df * (seeds - 1))
    paired = np.maximum(pooled, own) / seeds, np.where(pooled >= own, df, own_df)
    left_df = (cells - 1) * (seeds - 1)
    explained = (within**2).sum(axis=(1, 2)) - (left**2).sum(axis=(1, 2))
    ratio = explained / (seeds - 1) / ((left**2).sum(axis=(1, 2)) / left_df)
    is_paired = stats.f.sf(ratio, seeds - 1, left_df)[:, None] < SEED_ALPHA
    named = [
        {cell: weight for cell, weight in enumerate(one) if weight} for one in weights.tolist()
    ]
    if not by_rule or not can_give_up_pairs(named):
        is_paired[:] = True
    variances = values.var(axis=2, ddof=1)
    counts = np.full(cells, seeds)
    apart = find_errors_of_trainings(variances, counts, weights, (left**2).sum(axis=2))
    found, degrees = (np.where(is_paired, *both) for both in zip(paired, apart, strict=True))
    return found, degrees


def find_errors_of_trainings(
    variances: Array, counts: Array, weights: Array, noise: Array
) -> tuple[Array, Array]:
    """Return the variances of differences of means, without pairs, and their degrees of freedom.

    Args:
        variances: Variance of the trainings (sweeps, cells).
        counts: Number of each cell's trainings.
        weights: Weights by effect and cell.
        noise: Variances that the degrees of freedom are found with, but for a factor.
    """
    lengths = (weights**2).sum(axis=1)
    shares = (weights**2 / lengths[:, None]).mean(axis=0)
    equal, found = (
        one.sum(axis=1) ** 2 / (one**2 / (counts - 1)).sum(axis=1)
        for one in (shares[None], shares * noise)
    )
    df = np.minimum(equal, found)[:, None]
    pooled = (shares * variances).sum(axis=1)[:, None] * (weights**2 / counts).sum(axis=1)
    single = weights**2 * variances[:, None, :] / counts
    own = single.sum(axis=2)
    welch = own**2 / (single**2 / (counts - 1)).sum(axis=2)
    return np.maximum(pooled, own), np.where(pooled >= own, df, np.sqrt(df * welch))


def summarize(differences: Array, variances: Array, df: Array, lengths: Array) -> str:
    """Return the rate of sweeps with a false interval, its error, and the median half width."""
    reach = stats.t.isf(ALPHA / 2 / differences.shape[1], df) * np.sqrt(variances)
    rate = float((np.abs(differences) > reach).any(axis=1).mean())
    error = (rate * (1 - rate) / len(differences)) ** 0.5
    return f"{rate:6.1%} ± {error:.1%} {np.median(reach / np.sqrt(lengths)):7.2f}"


def move_seeds(cells: int, seeds: int, sweeps: int, random: np.random.Generator) -> list[str]:
    """Describe equal seeds, by the rule, and then as many trainings of which the reference has more."""
    _, weights = one_factor(cells)
    lengths = np.full(cells, 2.0)
    values = random.normal(size=(sweeps, cells + 1, seeds))
    equal = summarize(values.mean(axis=2) @ weights.T, *find_errors(values, weights), lengths)
    lines = [f"{cells} cells, {seeds} seeds each".ljust(46) + equal]
    for fewer in range(seeds - 1, 1, -1):
        counts = np.array([seeds + cells * (seeds - fewer), *[fewer] * cells])
        rows = [random.normal(size=(sweeps, count)) for count in counts]
        variances = np.stack([row.var(axis=1, ddof=1) for row in rows], axis=1)
        means = np.stack([row.mean(axis=1) for row in rows], axis=1)
        errors = find_errors_of_trainings(variances, counts, weights, variances)
        found = summarize(means @ weights.T, *errors, lengths)
        lines.append(f"  {fewer} each, {counts[0]} of the reference".ljust(46) + found)
    return lines


def main() -> None:
    options = read_options(__doc__, sweeps=5000, seeds=(2, 3, 5), seed=0, only="")
    heads = "by the rule   half   always paired   half"
    print(f"{'design, noise, seeds, spread of a seed':60}  {heads}")
    for (design, (levels, weights)), (name, noise), seeds, common in itertools.product(
        DESIGNS.items(), NOISES.items(), options.seeds, (0.0, 0.5, 1.0)
    ):
        if options.only not in design:
            continue
        random = np.random.default_rng(options.seed)
        shape = (options.sweeps, len(levels), seeds)
        values = noise(random, levels, shape)
        values = values + common * random.normal(size=(shape[0], 1, seeds))
        differences = values.mean(axis=2) @ weights.T
        found = [
            summarize(differences, *find_errors(values, weights, by_rule=by_rule), lengths)
            for lengths in [(weights**2).sum(axis=1)]
            for by_rule in (True, False)
        ]
        print(f"{design}, {name}, {seeds}, {common:g}".ljust(60), *found, flush=True)
    for cells, seeds in ((4, 4), (8, 4), (8, 5), (18, 5)):
        random = np.random.default_rng(options.seed)
        print(*move_seeds(cells, seeds, options.sweeps, random), sep="\n", flush=True)


if __name__ == "__main__":
    main()
