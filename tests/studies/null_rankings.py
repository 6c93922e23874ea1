"""Null sweeps for rankings and comparisons: how often a report says what is not true.

`python -m tests.studies.null_rankings --sweeps 10000` prints every structure.
"""

import itertools

import numpy as np

from kvlab.analysis.rankings import Ranking
from kvlab.analysis.standard_errors import StandardError
from kvlab.analysis.study import Study
from kvlab.analysis.sweep_shifts import estimate_shifts
from kvlab.analysis.trial_rows import TrialRow
from kvlab.analysis.verdicts import judge_family
from kvlab.store import Store
from tests.studies import read_options

NO_PAIRS = ", no pairs"
"""Of structures in which seeds explain nothing."""

APART = ("alike", "one noisy cell", "spreads of 1 to 20", "levels by seed", "skewed", "missing")
SHARED = ("shared trainings", "tied at serving")
STRUCTURES = (*(one + more for one in (*APART, *SHARED) for more in ("", NO_PAIRS)),)


def draw_values(structure, random, cells, seeds):
    """Draw one sweep whose cells are equal in truth: (cells, seeds), NaN where missing."""
    noise = random.normal(size=(cells, seeds))
    shared = 0.0 if structure.endswith(NO_PAIRS) else 5 * random.normal(size=seeds)
    structure = structure.removesuffix(NO_PAIRS)
    if structure == "one noisy cell":
        noise[0] *= 10
    elif structure == "spreads of 1 to 20":
        noise *= np.exp(np.linspace(0, 3, cells))[:, None]
    elif structure == "levels by seed":
        has_level = (np.arange(cells)[:, None] >> np.arange(3)) & 1
        noise = 0.3 * noise + has_level @ random.normal(size=(3, seeds))
    elif structure == "skewed":
        noise = random.exponential(size=(cells, seeds))
    elif structure == "missing":
        noise[1:][random.random((cells - 1, seeds)) < 0.15] = np.nan
    elif structure == "shared trainings":
        noise = np.repeat(noise[::2], 2, axis=0)[:cells] + 0.01 * noise
    elif structure == "tied at serving":  # every second cell has the weights of the one before it
        own = 10 * random.normal(size=(cells, seeds))
        own[::2] = 0.0
        noise = np.repeat(noise[::2], 2, axis=0)[:cells] + own
    return shared + noise


def simulate_rankings(structure, cells, seeds, sweeps):
    """Return how often claims about equal cells are wrong.

    Returns:
        ``best excluded``: the truly best cell is not among those that may be the best. Cells are
        equal, so this is the rate of the cell that is excluded most often. ``told apart``: the cell
        with the best mean is called better than another cell, the worst of these rates. ``any
        interval``: a simultaneous interval of a cell minus the first one excludes zero, judged as
        by `kvlab.analysis.cell_comparisons`.
    """
    random = np.random.default_rng(sum(map(ord, structure)) + 100 * cells + seeds)
    excluded, apart, outside = np.zeros(cells), np.zeros(cells), 0
    names = [(f"c{i}",) for i in range(cells)]
    for _ in range(sweeps):
        table = draw_values(structure, random, cells, seeds)
        values = {
            name: {seed: float(v) for seed, v in enumerate(row) if not np.isnan(v)}
            for name, row in zip(names, table, strict=True)
        }
        pairs = structure.startswith(SHARED)
        ids = {name: [f"{n // 2 if pairs else n}"] for n, name in enumerate(names)}
        noisy = names[1::2] if structure.startswith("tied at serving") else ()
        ranking = Ranking(values, names[0], ids, noisy=noisy)
        found = ranking.best(names)
        left = {found.levels, *found.rivals}
        excluded += [name in values and bool(values[name]) and name not in left for name in names]
        best = ranking.best_first(names)[0]
        others = [bool(values[name]) and name != best for name in names]
        apart += [is_other and ranking.told_apart(best, name)
                  for is_other, name in zip(others, names, strict=True)]  # fmt: skip
        outside += any(test.low > 0 or test.high < 0 for test in judge_cells(ranking, names))
    rates = {"best excluded": excluded.max(), "told apart": apart.max(), "any interval": outside}
    return {name: float(count) / sweeps for name, count in rates.items()}


def judge_cells(ranking, names):
    """Judge all cells against the first one together."""
    found = [ranking.difference(name, names[0]) for name in names[1:]]
    tested = [one for one in found if one is not None and one.kind == "tested"]
    errors = [StandardError(one.standard_error, one.df) for one in tested]
    return judge_family([one.value for one in tested], errors, 0.05)


FACTORS = {"heads": ("mha", "mqa"), "position": ("learned", "rope"), "sharing": ("none", "trained")}


def make_study(table, first_seed):
    """Return a study of a full factorial design, from a table of its cells and seeds."""
    levels = list(itertools.product(*FACTORS.values()))
    rows = [
        TrialRow(cell, first_seed + seed, f"{cell}{seed}", "done", f"{cell}{seed}",
                 {"loss": 5.0 + 0.01 * value}, record={"experiment": {"data": {"tokenizer": "a"}}})
        for cell, row in zip(levels, table, strict=True)
        for seed, value in enumerate(row)
        if not np.isnan(value)
    ]  # fmt: skip
    sweep = {"name": "null", "factors": FACTORS, "baseline": {f: v[0] for f, v in FACTORS.items()}}
    return Study(Store("nowhere"), sweep, rows)


def simulate_comparisons(structure, paired, seeds, pairs):
    """Return how often `kvlab compare` calls anything changed of two sweeps of equal truth."""
    random = np.random.default_rng(seeds + 10 * paired)
    wrong = 0
    for _ in range(pairs):
        before, after = (
            make_study(draw_values(structure, random, 8, seeds), first)
            for first in (0, 0 if paired else 50)
        )
        shared = {levels: levels for levels in before.cells if levels in after.cells}
        shifts = estimate_shifts(before, after, shared, "loss")
        every = (shifts.cells, shifts.against_baseline, shifts.effects)
        wrong += any(one.is_found for part in every for one in part.values())
    return wrong / pairs


def main():
    options = read_options(__doc__, sweeps=1000, cells=(2, 6, 20), seeds=(2, 3, 5))
    sweeps = options.sweeps
    print(f"{'structure':<28} cells seeds  best excluded  told apart  any interval")
    for structure, cells, seeds in itertools.product(STRUCTURES, options.cells, options.seeds):
        excluded, apart, outside = simulate_rankings(structure, cells, seeds, sweeps).values()
        rates = f"{excluded:13.1%}  {apart:10.1%}  {outside:12.1%}"
        print(f"{structure:<28} {cells:5} {seeds:5}  {rates}", flush=True)
    print(f"\n{'structure':<20} {'seeds':<12} compare calls a change")
    for structure, paired in itertools.product(APART, (True, False)):
        rate = simulate_comparisons(structure, paired, 3, max(1, sweeps // 10))
        print(f"{structure:<20} {'3 shared' if paired else '3 and 3 other':<13} {rate:21.1%}")


if __name__ == "__main__":
    main()
