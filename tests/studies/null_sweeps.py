"""Sweeps without any effect: how often does a report say something false?

`python -m tests.studies.null_sweeps` simulates 10,000 sweeps of every structure, with the functions that
reports are made with. Per structure it prints

- *own t*: the share of sweeps in which the levels' own paired t-tests with Holm's correction call
  any level better or worse,
- *report*: the share in which the report's verdicts say anything false,
- *coverage*: the share in which all simultaneous intervals contain the truth,
- *power*: the share of levels that are called worse, by their own tests and by the report, where
  each costs `POWER_SIZE` times the noise of one training times the length of its contrast.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from kvlab.analysis.divergence import find_wrong_trainings
from kvlab.analysis.effects import Effect, estimate_main_effects
from kvlab.analysis.estimand import Estimand
from kvlab.analysis.statistics import ALPHA
from kvlab.analysis.trial_rows import TrialRow
from tests.studies import read_options
from tests.studies.null_looks import print_tallies
from tests.studies.null_pairing import (
    Array,
    Noise,
    Shape,
    level_by_seed,
    noisy_level,
    scaled,
    skewed,
)
from tests.support.holm import holm_correction

Factors = Mapping[str, tuple[str, ...]]
POWER_SIZE = 3.0
WRONG_COST = 20.0
TIES = {"serving": {"tied": {"serving.tie": "adjacent:2"}}}
CHUNK = 1000
NO_PAIRS = "seeds explain nothing"


def binary(count: int) -> Factors:
    return {f"f{n}": ("off", "on") for n in range(count)}


ONE_OF_18 = {"f": ("base", *(f"l{n}" for n in range(18)))}
ONE_OF_5 = {"f": ("base", *(f"l{n}" for n in range(5)))}
THREE = {"f0": ("off", "on"), "f1": ("off", "on"), "f2": ("off", "on", "more")}
SERVED = {**binary(2), "serving": ("plain", "tied")}

alike, one_noisy_cell, noisy_baseline = scaled(1, 0), scaled(10, -1), scaled(10, 0)


def one_level_by_seed(random: np.random.Generator, levels: Array, shape: Shape) -> Array:
    together = 3 * random.normal(size=(shape[0], 1, shape[2]))
    return random.normal(size=shape) + np.einsum("cl,xls->xcs", levels[:, :1], together)


NOISES: dict[str, Noise] = {
    "alike": alike,
    "skewed": skewed,
    "one noisy cell": one_noisy_cell,
    "noisy baseline": noisy_baseline,
    "noisy level": noisy_level,
    "level by seed": level_by_seed,
    "one level by seed": one_level_by_seed,
}


@dataclass(frozen=True)
class Structure:
    """A kind of sweep.

    Attributes:
        factors: Factor -> levels.
        seeds: Number of seeds.
        noise: Noise of the trainings.
        one_factor: Whether the cells are the baseline and each other level alone.
        has_trial: ``(index of the cell, seed)`` to whether the trial has ended.
        common: Spread of what all trainings share at a seed. Where it is 0, seeds explain nothing.
        served: Spread that ties at serving add, by that of a training.
        goes_wrong: Probability that a training of the first level goes wrong, by `WRONG_COST`.
        diverges: Of which side of the first level the worse half of the trainings diverges.
        effects: True cost of each level, in deviations of one training; the rest have none.
        margin: A cost that does not matter.
    """

    factors: Factors
    seeds: int
    noise: Noise = alike
    one_factor: bool = False
    has_trial: Callable[[int, int], bool] = lambda _cell, _seed: True
    common: float = 10.0
    served: float = 1.0
    goes_wrong: float = 0.0
    diverges: Literal["", "level", "baseline"] = ""
    effects: tuple[float, ...] = ()
    margin: float | None = None

    @property
    def planted(self) -> dict[str, float]:
        """The cost of every level."""
        names = [f"{f}={level}" for f, levels in self.factors.items() for level in levels[1:]]
        return dict(itertools.zip_longest(names, self.effects, fillvalue=0.0))

    @property
    def cells(self) -> list[tuple[str, ...]]:
        cells = list(itertools.product(*self.factors.values()))
        base = cells[0]
        if not self.one_factor:
            return cells
        return [c for c in cells if sum(a != b for a, b in zip(c, base, strict=True)) <= 1]

    def truth(self) -> dict[str, float]:
        found = self.planted
        found[next(iter(found))] += self.goes_wrong * WRONG_COST
        return found

    def has_levels(self, cells: list[tuple[str, ...]]) -> Array:
        """Return which levels each of some cells has."""
        named = [{f"{f}={v}" for f, v in zip(self.factors, c, strict=True)} for c in cells]
        return np.array([[float(name in one) for name in self.planted] for one in named])


def simulate(
    structure: Structure,
    sweeps: int,
    random: np.random.Generator,
    *,
    as_before: bool = False,
) -> Iterator[list[Effect]]:
    """Yield the effects of one simulated sweep after the other, as a report has them.

    Args:
        structure: The kind of sweep.
        sweeps: Number of sweeps.
        random: Source of the noise.
        as_before: Record diverged trials as failed, and flag no training that went wrong.
    """
    cells = structure.cells
    trained = [tuple("plain" if level == "tied" else level for level in c) for c in cells]
    trainings = list(dict.fromkeys(trained))
    place = [trainings.index(one) for one in trained]
    levels = structure.has_levels(trainings)
    costs = structure.has_levels(cells) @ np.array([*structure.planted.values()])
    estimand = Estimand(cells, structure.factors, TIES)
    rows = {
        c: {
            s: TrialRow(c, s, f"{n}.{s}", "done", f"{place[n]}.{s}", {"loss": 0.0})
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
        sides = {"level": levels[:, 0] > 0, "baseline": levels[:, 0] == 0}
        at_risk = sides.get(structure.diverges, np.zeros(len(levels), dtype=bool))
        bad = (noise > np.median(noise)) & at_risk[:, None]
        for one, is_bad in zip(losses.tolist(), bad.tolist(), strict=True):
            for number, (levels_of, by_seed) in enumerate(rows.items()):
                for seed, row in by_seed.items():
                    row.measurements["loss"] = one[number][seed]
                    if structure.diverges:
                        status = "failed" if as_before else "diverged"
                        has_ended = not is_bad[place[number]][seed]
                        rows[levels_of][seed] = replace(row, status="done" if has_ended else status)
            effects = estimate_main_effects(
                rows, structure.factors, "loss", estimand=estimand, margin=structure.margin
            )
            if structure.goes_wrong and not as_before:
                wrong = {training.split(".")[0] for training in find_wrong_trainings(rows)}
                names = {c: str(place[n]) for n, c in enumerate(cells)}
                effects = [
                    replace(e, went_wrong=len(wrong & {names[c] for c in e.weights}))
                    for e in effects
                ]
            yield effects


@dataclass
class Rates:
    """Shares of simulated sweeps."""

    own: float
    report: float
    coverage: float
    undecided: float


def is_false(effect: Effect, truth: float) -> bool:
    """Whether a verdict says something false."""
    name, margin = effect.verdict_name, effect.margin or 0.0
    return {
        "better": truth >= 0,
        "worse": truth <= 0,
        "worse within": truth <= 0 or truth >= margin,
        "bounded": truth >= margin,
    }.get(name, False)


def measure(structure: Structure, sweeps: int, seed: int, *, as_before: bool = False) -> Rates:
    """Return how often the statements about a structure are false."""
    truth = structure.truth()
    own = report = covered = undecided = tested = 0
    random = np.random.default_rng(seed)
    for effects in simulate(structure, sweeps, random, as_before=as_before):
        null = [e for e in effects if e.is_tested and truth[e.name] == 0]
        p_values = holm_correction([e.estimate.p for e in null])  # of effects that have none
        own += min(p_values, default=1.0) <= ALPHA
        report += any(is_false(e, truth[e.name]) for e in effects)
        intervals = [e for e in effects if e.has_interval]
        covered += all(e.low <= truth[e.name] <= e.high for e in intervals)
        undecided += sum(not e.is_significant for e in effects)
        tested += len(effects)
    return Rates(own / sweeps, report / sweeps, covered / sweeps, undecided / tested)


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
        found[f"{name}, {seeds} seeds, {NO_PAIRS}"] = without_pairs

    for seeds in (2, 3, 5):
        for name, noise in NOISES.items():
            add(f"1 level, {name}", binary(1), seeds, noise)
            add_both(f"5 levels of one factor, {name}", ONE_OF_5, seeds, noise)
            add_both(f"4 levels of three factors, {name}", THREE, seeds, noise)
        for name in ("alike", "noisy baseline"):
            add_both(f"18 levels, {name}", ONE_OF_18, seeds, NOISES[name])
        add("5 factors, one at a time", binary(5), seeds, one_factor=True)
        for size in (1, 10):
            add_both(f"serving ties of {size} times the spread", SERVED, seeds, served=size)
        for name, effects, margin in (
            (", two of them costly", (50.0, 50.0), None),
            (" at the margin", (1.0,) * 4, 1.0),
            (", two none and two at the margin", (0.0, 2.0, 0.0, 2.0), 2.0),
            (", half costly, half at the margin", (50.0, 50.0, 2.0, 2.0), 2.0),
        ):
            add(f"4 levels{name}", THREE, seeds, effects=effects, margin=margin)
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


def main() -> None:
    options = read_options(__doc__, sweeps=10_000, seed=0, only="")
    print(f"{options.sweeps:,} sweeps of each structure, seed {options.seed}")
    print(f"{'structure':62}  own t  report  coverage  power: own  report  seconds")
    for name, structure in list_structures().items():
        if options.only not in name:
            continue
        start = time.monotonic()
        rates = measure(structure, options.sweeps, options.seed)
        line = f"{name:62} {rates.own:6.3f} {rates.report:7.3f} {rates.coverage:9.3f}"
        if structure.diverges or structure.goes_wrong:
            before = measure(structure, options.sweeps, options.seed, as_before=True)
            line += f"  (before: {before.report:.3f})"
        elif structure.noise is alike and not structure.effects:
            powers = measure_power(structure, max(1, options.sweeps // 10), options.seed)
            line += f" {powers[0]:11.2f} {powers[1]:7.2f}"
        print(f"{line}   {time.monotonic() - start:.0f}", flush=True)
    print_tallies(options.sweeps, options.seed, options.only)


if __name__ == "__main__":
    main()
