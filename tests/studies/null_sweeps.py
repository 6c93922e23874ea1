"""Sweeps without any effect, or with planted ones: how often does a report say something false?

    python -m tests.studies null_sweeps [--sweeps 10000] [--seed 0] [--only TEXT]

Every structure of which the name contains TEXT is simulated, with the functions that reports and
drivers are made with. ``4 levels`` and the like are sweeps of all their seeds at once. Printed are

- *own t*: the share of sweeps in which the levels' own paired t-tests with Holm's correction call
  any level without an effect better or worse,
- *report*: the share in which the report's verdicts say anything false,
- *coverage*: the share in which all simultaneous intervals contain the truth,
- *power*: the share of levels that are called worse, by their own tests and by the report, where
  each costs `POWER_SIZE` times the noise of one training times the length of its contrast.

``shares: ...`` are shares of right items, near 1, at 0.9 and near 0, of trainings that are alike or
spread. ``rankings: ...`` are cells without a difference (`rank`).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from kvlab.analysis.divergence import find_wrong_trainings
from kvlab.analysis.effects import Effect, estimate_main_effects
from kvlab.analysis.estimand import Estimand
from kvlab.analysis.rankings import Ranking
from kvlab.analysis.standard_errors import StandardError
from kvlab.analysis.statistics import ALPHA
from kvlab.analysis.trial_rows import TrialRow
from kvlab.analysis.verdicts import judge_family
from kvlab.store.metrics import METRICS, Metric
from tests.studies import read_options

Array = np.ndarray
Shape = tuple[int, ...]
Noise = Callable[[np.random.Generator, Array, Shape], Array]
"""``(random, levels by cell, shape)`` to the noise of trainings (sweeps, cells, seeds)."""
Factors = Mapping[str, tuple[str, ...]]
POWER_SIZE = 3.0
WRONG_COST = 20.0
TIES = {"serving": {"tied": {"serving.tie": "adjacent:2"}}}
CHUNK = 1000
NO_PAIRS = ", seeds explain nothing"


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


def one_level_by_seed(random: np.random.Generator, levels: Array, shape: Shape) -> Array:
    together = 3 * random.normal(size=(shape[0], 1, shape[2]))
    return random.normal(size=shape) + np.einsum("cl,xls->xcs", levels[:, :1], together)


alike, one_noisy_cell, noisy_baseline = scaled(1, 0), scaled(10, -1), scaled(10, 0)
NOISES: dict[str, Noise] = {
    "alike": alike, "skewed": skewed, "one noisy cell": one_noisy_cell,
    "noisy baseline": noisy_baseline, "noisy level": noisy_level, "level by seed": level_by_seed,
    "one level by seed": one_level_by_seed,
}  # fmt: skip


def holm_correction(p_values: Sequence[float]) -> list[float]:
    """Return corrected p-values, in the order of the input (Holm 1979)."""
    count, corrected, largest = len(p_values), [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def binary(count: int) -> Factors:
    return {f"f{n}": ("off", "on") for n in range(count)}


ONE_OF_18 = {"f": ("base", *(f"l{n}" for n in range(18)))}
ONE_OF_5 = {"f": ("base", *(f"l{n}" for n in range(5)))}
THREE = {"f0": ("off", "on"), "f1": ("off", "on"), "f2": ("off", "on", "more")}
SERVED = {**binary(2), "serving": ("plain", "tied")}


ANSWERS = Metric("right answers", "", "higher", items="answered")
"""A share of items, which few sweeps measure: its tests and this study add it to the table."""


@dataclass(frozen=True)
class Structure:
    """A kind of sweep.

    Attributes:
        factors: Factor -> levels.
        seeds: Number of seeds.
        noise: Noise of the trainings.

        has_trial: ``(index of the cell, seed)`` to whether the trial has ended.
        common: Spread of what all trainings share at a seed. Where it is 0, seeds explain nothing.
        served: Spread that ties at serving add, by that of a training.
        goes_wrong: Probability that a training of the first level goes wrong, by `WRONG_COST`.
        diverges: Of which side of the first level the worse half of the trainings diverges.
        effects: True cost of each level, in deviations of one training; the rest have none.
        margin: A cost that does not matter.
        items: Of a share of right items, their number; 0 of a loss.
        share: The mean share of wrong items, without a cost.
        spread: How far trainings are from it: the variance of their shares in parts of the largest
            that a mean allows.
    """

    factors: Factors
    seeds: int
    noise: Noise = alike

    has_trial: Callable[[int, int], bool] = lambda _cell, _seed: True
    common: float = 10.0
    served: float = 1.0
    goes_wrong: float = 0.0
    diverges: Literal["", "level", "baseline"] = ""
    effects: tuple[float, ...] = ()
    margin: float | None = None
    items: int = 0
    share: float = 0.0
    spread: float = 0.0

    @property
    def metric(self) -> str:
        return "answers" if self.items else "loss"

    @property
    def planted(self) -> dict[str, float]:
        """The cost of every level."""
        names = [f"{f}={level}" for f, levels in self.factors.items() for level in levels[1:]]
        return dict(itertools.zip_longest(names, self.effects, fillvalue=0.0))

    @property
    def cells(self) -> list[tuple[str, ...]]:
        return list(itertools.product(*self.factors.values()))

    def truth(self) -> dict[str, float]:
        found = self.planted
        found[next(iter(found))] += self.goes_wrong * WRONG_COST
        return found

    def has_levels(self, cells: list[tuple[str, ...]]) -> Array:
        """Return which levels each of some cells has."""
        named = [{f"{f}={v}" for f, v in zip(self.factors, c, strict=True)} for c in cells]
        return np.array([[float(name in one) for name in self.planted] for one in named])


def simulate(
    structure: Structure, sweeps: int, random: np.random.Generator
) -> Iterator[list[Effect]]:
    """Yield the effects of one simulated sweep after the other, as a report has them."""
    cells = structure.cells
    trained = [tuple("plain" if level == "tied" else level for level in c) for c in cells]
    trainings = list(dict.fromkeys(trained))
    place = [trainings.index(one) for one in trained]
    levels = structure.has_levels(trainings)
    costs = structure.has_levels(cells) @ np.array([*structure.planted.values()])
    estimand = Estimand(cells, structure.factors, TIES)
    rows = {
        c: {
            s: TrialRow(
                c, s, f"{n}.{s}", "done", f"{place[n]}.{s}", {"answered": float(structure.items)}
            )
            for s in range(structure.seeds)
            if structure.has_trial(n, s)
        }
        for n, c in enumerate(cells)
    }
    for start in range(0, sweeps, CHUNK):
        count = min(CHUNK, sweeps - start)
        noise = structure.noise(random, levels, (count, len(levels), structure.seeds))
        if structure.goes_wrong:
            is_wrong = random.random(noise.shape) < structure.goes_wrong
            noise = noise + WRONG_COST * is_wrong * (levels[:, 0] > 0)[:, None]
        served = structure.served * random.normal(size=(count, len(cells), structure.seeds))
        shared = structure.common * random.normal(size=(count, 1, structure.seeds))
        is_tied = np.array([float("tied" in c) for c in cells])[:, None]
        losses = noise[:, place] + shared + costs[:, None] + is_tied * served
        if structure.items:
            losses = draw_shares(structure, random, costs, losses.shape)
        sides = {"level": levels[:, 0] > 0, "baseline": levels[:, 0] == 0}
        at_risk = sides.get(structure.diverges, np.zeros(len(levels), dtype=bool))
        bad = (noise > np.median(noise)) & at_risk[:, None]
        for one, is_bad in zip(losses.tolist(), bad.tolist(), strict=True):
            for number, by_seed in enumerate(rows.values()):
                for seed, row in by_seed.items():
                    row.measurements[structure.metric] = one[number][seed]
                    if structure.diverges:
                        status = "diverged" if is_bad[place[number]][seed] else "done"
                        by_seed[seed] = replace(row, status=status)
            effects = estimate_main_effects(
                rows, estimand, structure.metric, margin=structure.margin
            )
            if structure.goes_wrong:
                wrong = {training.split(".")[0] for training in find_wrong_trainings(rows)}
                names = {c: str(place[n]) for n, c in enumerate(cells)}
                effects = [
                    replace(e, went_wrong=len(wrong & {names[c] for c in e.weights}))
                    for e in effects
                ]
            yield effects


def draw_shares(
    structure: Structure, random: np.random.Generator, costs: Array, shape: Shape
) -> Array:
    """Draw shares of right items (sweeps, cells, seeds), whose means are exact."""
    means = np.broadcast_to((structure.share + costs)[:, None], shape)
    if structure.spread:
        size = 1 / structure.spread - 1
        means = random.beta(size * means, size * (1 - means))
    return 1 - random.binomial(structure.items, means) / structure.items


def is_false(effect: Effect, truth: float) -> bool:
    """Whether a verdict says something false."""
    name, margin = effect.verdict_name, effect.margin or 0.0
    return {
        "better": truth >= 0,
        "worse": truth <= 0,
        "worse within": truth <= 0 or truth >= margin,
        "bounded": truth >= margin,
    }.get(name, False)


def measure(structure: Structure, sweeps: int, seed: int) -> tuple[float, float, float]:
    """Return the shares of sweeps with a false own test, with a false verdict, and covered."""
    truth = structure.truth()
    own = report = covered = 0
    for effects in simulate(structure, sweeps, np.random.default_rng(seed)):
        null = [e for e in effects if e.is_tested and truth[e.name] == 0]
        p_values = holm_correction([e.estimate.p for e in null])  # of effects that have none
        own += min(p_values, default=1.0) <= ALPHA
        report += any(is_false(e, truth[e.name]) for e in effects)
        intervals = [e for e in effects if e.has_interval]
        sign = -1 if structure.items else 1  # more right items are better
        covered += all(e.low <= sign * truth[e.name] <= e.high for e in intervals)
    return own / sweeps, report / sweeps, covered / sweeps


def measure_power(structure: Structure, sweeps: int, seed: int) -> tuple[float, float]:
    """Return the share of levels that are called worse, by their own tests and by the report."""
    first = next(simulate(structure, 1, np.random.default_rng(seed)))
    lengths = [sum(weight**2 for weight in effect.weights.values()) ** 0.5 for effect in first]
    costly = replace(structure, effects=tuple(POWER_SIZE * length for length in lengths))
    own = report = total = 0
    for effects in simulate(costly, sweeps, np.random.default_rng(seed)):
        p_values = holm_correction([e.estimate.p for e in effects])
        own += sum(p <= ALPHA and e.value > 0 for p, e in zip(p_values, effects, strict=True))
        report += sum(e.verdict_name == "worse" for e in effects)
        total += len(effects)
    return own / total, report / total


def list_structures() -> dict[str, Structure]:
    """Return the structures by name."""
    found: dict[str, Structure] = {}

    def add(name: str, factors: Factors, seeds: int, *noise: Noise, **options: Any) -> None:
        found[f"{name}, {seeds} seeds"] = Structure(factors, seeds, *noise, **options)

    def add_both(name: str, factors: Factors, seeds: int, *noise: Noise, **options: Any) -> None:
        add(name, factors, seeds, *noise, **options)
        without_pairs = Structure(factors, seeds, *noise, common=0, **options)
        found[f"{name}, {seeds} seeds{NO_PAIRS}"] = without_pairs

    for seeds in (2, 3, 5):
        for name, noise in NOISES.items():
            add(f"1 level, {name}", binary(1), seeds, noise)
            add_both(f"5 levels of one factor, {name}", ONE_OF_5, seeds, noise)
            add_both(f"4 levels of three factors, {name}", THREE, seeds, noise)
        for name in ("alike", "noisy baseline"):
            add_both(f"18 levels, {name}", ONE_OF_18, seeds, NOISES[name])

        for size in (1, 10):
            add_both(f"serving ties of {size} times the spread", SERVED, seeds, served=size)
        for name, effects, margin in (
            (", two of them costly", (50.0, 50.0), None),
            (" at the margin", (1.0,) * 4, 1.0),
            (", two none and two at the margin", (0.0, 2.0, 0.0, 2.0), 2.0),
            (", half costly, half at the margin", (50.0, 50.0, 2.0, 2.0), 2.0),
        ):
            add(f"4 levels{name}", THREE, seeds, effects=effects, margin=margin)
    for seeds, (share, spread), items in itertools.product(
        (2, 3, 5), ((0.001, 0.0), (0.001, 0.001), (0.1, 0.0), (0.1, 0.1), (0.95, 0.01)), (100, 8000)
    ):
        options = {"items": items, "share": share, "spread": spread}
        for name, factors in (("5 levels of one factor", ONE_OF_5), ("4 levels", THREE)):
            add(f"shares: {name}, {share} of {items} by {spread}", factors, seeds, **options)
            at = options | {"effects": (0.02,) * 5, "margin": 0.02}
            one = options | {"effects": (0.02,), "margin": 0.02}
            name = f"shares: {name} at the margin, {share} of {items} by {spread}"
            add(name, factors, seeds, **(at if factors is ONE_OF_5 else one))
    for seeds in (3, 5):
        for design, factors in (("5 levels of one factor", ONE_OF_5), ("4 levels", THREE)):
            name = f"{design}, trainings of one go wrong"
            add(name, factors, seeds, goes_wrong=0.2, margin=3.0)
        for name, factors, noise, has_trial in (
            ("5 levels", ONE_OF_5, alike, lambda cell, seed: cell < 3 or seed < 2),
            ("4 levels", THREE, alike, lambda cell, seed: (cell + seed) % 5 != 0),
            ("4 levels, noisy cell", THREE, one_noisy_cell, lambda c, s: c < 9 or s < 2),
            ("4 levels, noisy baseline", THREE, noisy_baseline, lambda c, s: c > 2 or s < 2),
            ("5 levels, noisy cell", ONE_OF_5, one_noisy_cell, lambda c, s: c < 3 or s < 2),
        ):
            add(f"{name}, trials missing", factors, seeds, noise, has_trial=has_trial)
    for seeds, side in itertools.product((3, 5, 10), ("level", "baseline")):
        for name, factors in (("1 level", binary(1)), ("4 levels", THREE)):
            add(f"{name}, worse half of the {side} diverges", factors, seeds, diverges=side)
    return found


SHARED = ("shared trainings", "tied at serving")
RANKED = ("alike", "one noisy cell", "spreads of 1 to 20", "levels by seed", "skewed", "missing")


def draw_cells(kind: str, random: np.random.Generator, cells: int, seeds: int) -> Array:
    """Draw one sweep whose cells are equal in truth: (cells, seeds), NaN where missing."""
    noise = random.normal(size=(cells, seeds))
    shared = 0.0 if kind.endswith(NO_PAIRS) else 5 * random.normal(size=seeds)
    kind = kind.removesuffix(NO_PAIRS)
    if kind == "one noisy cell":
        noise[0] *= 10
    elif kind == "spreads of 1 to 20":
        noise *= np.exp(np.linspace(0, 3, cells))[:, None]
    elif kind == "levels by seed":
        has_level = (np.arange(cells)[:, None] >> np.arange(3)) & 1
        noise = 0.3 * noise + has_level @ random.normal(size=(3, seeds))
    elif kind == "skewed":
        noise = random.exponential(size=(cells, seeds))
    elif kind == "missing":
        noise[1:][random.random((cells - 1, seeds)) < 0.15] = np.nan
    elif kind == "shared trainings":
        noise = np.repeat(noise[::2], 2, axis=0)[:cells] + 0.01 * noise
    elif kind == "tied at serving":  # every second cell has the weights of the one before it
        own = 10 * random.normal(size=(cells, seeds))
        own[::2] = 0.0
        noise = np.repeat(noise[::2], 2, axis=0)[:cells] + own
    return shared + noise


def rank(kind: str, cells: int, seeds: int, sweeps: int) -> dict[str, float]:
    """Return how often claims about equal cells are wrong.

    Returns:
        ``best excluded``: the truly best cell is not among those that may be the best. Cells are
        equal, so this is the rate of the cell that is excluded most often. ``told apart``: the cell
        with the best mean is called better than another cell, the worst of these rates. ``any
        interval``: a simultaneous interval of a cell minus the first one excludes zero, judged as
        by `kvlab.analysis.cell_comparisons`.
    """
    random = np.random.default_rng(sum(map(ord, kind)) + 100 * cells + seeds)
    excluded, apart, outside = np.zeros(cells), np.zeros(cells), 0
    names = [(f"c{i}",) for i in range(cells)]
    noisy = names[1::2] if kind.startswith("tied at serving") else ()
    share = 2 if kind.startswith(SHARED) else 1
    for _ in range(sweeps):
        values = {
            name: {seed: float(v) for seed, v in enumerate(row) if not np.isnan(v)}
            for name, row in zip(names, draw_cells(kind, random, cells, seeds), strict=True)
        }
        ids = {name: [f"{n // share}"] for n, name in enumerate(names)}
        ranking = Ranking(values, names[0], ids, noisy=noisy)
        found = ranking.best(names)
        left, best = {found.levels, *found.rivals}, ranking.best_first(names)[0]
        excluded += [bool(values[name]) and name not in left for name in names]
        apart += [bool(values[n]) and n != best and ranking.told_apart(best, n) for n in names]
        others = [ranking.difference(name, names[0]) for name in names[1:]]
        tested = [one for one in others if one is not None and one.kind == "tested"]
        errors = [StandardError(one.standard_error, one.df) for one in tested]
        judged = judge_family([one.value for one in tested], errors, 0.05)
        outside += any(test.low > 0 or test.high < 0 for test in judged)
    rates = {"best excluded": excluded.max(), "told apart": apart.max(), "any interval": outside}
    return {name: float(count) / sweeps for name, count in rates.items()}


def main() -> None:
    METRICS["answers"] = ANSWERS
    options = read_options(__doc__, sweeps=10_000, seed=0, only="")
    sweeps, seed = options.sweeps, options.seed
    print(f"{sweeps:,} sweeps of each structure, seed {seed}")
    print(f"{'structure':62}  own t  report  coverage  power: own  report")
    for name, structure in list_structures().items():
        if options.only in name:
            own, report, coverage = measure(structure, sweeps, seed)
            line = f"{name:62} {own:6.3f} {report:7.3f} {coverage:9.3f}"
            special = structure.effects or structure.diverges or structure.goes_wrong
            special = special or structure.items
            if structure.noise is alike and not special:
                powers = measure_power(structure, max(1, sweeps // 10), seed)
                line += f" {powers[0]:11.2f} {powers[1]:7.2f}"
            print(line, flush=True)
    print(f"{'rankings':62} best excluded, told apart, any interval")
    for kind, more, cells, seeds in itertools.product(
        (*RANKED, *SHARED), ("", NO_PAIRS), (2, 6, 20), (2, 3, 5)
    ):
        name = f"rankings: {kind}{more}, {cells} cells, {seeds} seeds"
        if options.only in name:
            rates = rank(kind + more, cells, seeds, sweeps).values()
            print(f"{name:62}", *(f"{rate:9.3f}" for rate in rates), flush=True)
