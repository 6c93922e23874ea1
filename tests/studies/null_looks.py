"""Simulate sweeps with looks: family error, coverage, power, seeds; part of `python -m tests.studies.null_sweeps`.

The statistics are those that drivers and reports use, `kvlab.analysis.sequential`. Simulated is one
baseline and one cell a claim, so that all differences share the baseline's noise.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlab.analysis.sequential import ClaimState, Looks
from kvlab.analysis.statistics import t_cdf
from kvlab.analysis.verdicts import DIFFERENT
from kvlab.sweep.planning.looks import WORSE
from tests.support.holm import holm_correction

LOOKS = (3, 5, 7, 10)

Noise = Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]


def unequal(random: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Cells whose spreads differ by up to a factor of 8."""
    return random.standard_normal(shape) * np.geomspace(0.35, 2.8, shape[0])[:, None]


def skewed(random: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Losses with a long upper tail."""
    return random.gamma(2.0, 1.0, shape) / 2**0.5


@dataclass(frozen=True)
class Structure:
    """Sweeps of one kind.

    Attributes:
        effects: True difference of each claim from the baseline, in deviations of one trial.
        noise: Draws the noise of every cell (the baseline first) at every seed.
        margin: Of equivalence; None declares none.
        failing: Probability that a trial fails, whatever its loss.
        diverging: Share of the first level's trials that diverge: those of the highest loss.
        looks: Number of seeds at each look.
    """

    effects: tuple[float, ...]
    noise: Noise = np.random.Generator.standard_normal
    margin: float | None = None
    failing: float = 0.0
    diverging: float = 0.0
    looks: tuple[int, ...] = LOOKS


STRUCTURES = {
    "1 null": Structure((0.0,)),
    "5 nulls": Structure((0.0,) * 5),
    "18 nulls": Structure((0.0,) * 18),
    "5 nulls, looks 2,3,5,10": Structure((0.0,) * 5, looks=(2, 3, 5, 10)),
    "5 nulls, unequal spreads": Structure((0.0,) * 5, unequal),
    "5 nulls, skewed": Structure((0.0,) * 5, skewed),
    "5 nulls, 15% failed": Structure((0.0,) * 5, failing=0.15),
    "5 nulls, worse half of one diverges": Structure((0.0,) * 5, diverging=0.5),
    "2 large, 3 nulls": Structure((5.0, 5.0, 0.0, 0.0, 0.0)),
    "2 large, 3 nulls, margin 1.5": Structure((5.0, 5.0, 0.0, 0.0, 0.0), margin=1.5),
    "5 at the margin": Structure((1.5,) * 5, margin=1.5),
    "4 at the margin, 1 null": Structure((1.5,) * 4 + (0.0,), margin=1.5),
    "5 nulls, margin 3": Structure((0.0,) * 5, margin=3.0),
    "5 of 1.5": Structure((1.5,) * 5),
    "5 of 3": Structure((3.0,) * 5),
}


@dataclass
class Tally:
    """What many sweeps of one structure gave, as shares.

    Attributes:
        error: Sweeps with any wrong claim.
        coverage: Sweeps all of whose last intervals cover the true difference.
        power: Claims of a true difference that are called; `fixed_power` those that a t-test with
            Holm's correction calls at the most seeds.
        bounded: Claims that are called no costlier than the margin.
        seeds: Mean number of trials, as a share of those of the most seeds.
    """

    error: float = 0.0
    coverage: float = 0.0
    power: float = 0.0
    fixed_power: float = 0.0
    bounded: float = 0.0
    seeds: float = 0.0


def simulate(structure: Structure, sweeps: int, seed: int = 0) -> Tally:
    """Return what ``sweeps`` sweeps of a structure give."""
    random, tally = np.random.default_rng(seed), Tally()
    for _ in range(sweeps):
        one = _simulate_sweep(structure, random)
        for name, value in vars(one).items():
            setattr(tally, name, getattr(tally, name) + value / sweeps)
    return tally


def _simulate_sweep(structure: Structure, random: np.random.Generator) -> Tally:
    count, maximum = len(structure.effects), structure.looks[-1]
    losses = structure.noise(random, (count + 1, maximum))
    has_ended = random.random(losses.shape) >= structure.failing
    if structure.diverging:
        has_ended[1] &= losses[1] <= np.quantile(losses[1], 1 - structure.diverging)
    losses[1:] += np.array(structure.effects)[:, None]
    allowed = {"0": WORSE} if structure.diverging else {}
    names = [str(number) for number in range(count)]
    looks = Looks(structure.looks, count, margin=structure.margin)
    states = {name: ClaimState() for name in names}
    seeds = np.zeros(count + 1, dtype=int)
    for size in structure.looks:
        is_open = [states[name].is_open for name in names]
        seeds[[any(is_open), *is_open]] = size
        if not any(is_open):
            break
        differences = {}
        for row, name in enumerate(names, 1):
            paired = has_ended[0, : seeds[row]] & has_ended[row, : seeds[row]]
            differences[name] = (losses[row] - losses[0])[: seeds[row]][paired].tolist()
        states = looks.take(states, differences, allowed)
    return _judge(structure, losses, has_ended, [states[name] for name in names], seeds)


def _judge(
    structure: Structure,
    losses: NDArray[np.float64],
    has_ended: NDArray[np.bool_],
    states: list[ClaimState],
    seeds: NDArray[np.int_],
) -> Tally:
    wrong, covered, called, real = False, True, 0, 0
    for state, effect in zip(states, structure.effects, strict=True):
        is_called = state.outcome in DIFFERENT
        wrong |= is_called and (effect == 0.0 or (effect > 0) != state.outcome.startswith("worse"))
        wrong |= state.outcome in ("bounded", "worse within") and effect >= (structure.margin or 0)
        covered &= state.low <= effect <= state.high
        real += effect != 0.0
        called += is_called and effect != 0.0
    fixed = _count_fixed(structure, losses, has_ended)
    return Tally(
        error=wrong,
        coverage=covered,
        power=called / max(1, real),
        fixed_power=fixed / max(1, real),
        bounded=sum(state.outcome == "bounded" for state in states) / len(states),
        seeds=seeds.sum() / seeds.size / structure.looks[-1],
    )


def _count_fixed(
    structure: Structure, losses: NDArray[np.float64], has_ended: NDArray[np.bool_]
) -> int:
    """Return how many true differences Holm's t-tests call at the most seeds."""
    p_values = []
    for row in range(1, len(losses)):
        paired = has_ended[0] & has_ended[row]
        found = (losses[row] - losses[0])[paired]
        if found.size < 2:
            p_values.append(1.0)
            continue
        t = found.mean() / found.std(ddof=1) * found.size**0.5
        p_values.append(2 * t_cdf(-abs(t), found.size - 1))
    corrected = holm_correction(p_values)
    return sum(
        p < 0.05 and effect != 0 for p, effect in zip(corrected, structure.effects, strict=True)
    )


def print_tallies(sweeps: int, seed: int, only: str = "") -> None:
    """Simulate the structures whose names contain ``only``, and print a line for each."""
    print(f"{'looks at 3, 5, 7 and 10 seeds':62}  error  coverage  power  fixed  bounded  trials")
    for name, structure in STRUCTURES.items():
        if only not in f"looks: {name}":
            continue
        one = simulate(structure, sweeps, seed)
        shares = f"{one.error:7.3f} {one.coverage:9.3f} {one.power:6.2f} {one.fixed_power:6.2f}"
        print(f"{f'looks: {name}':62}{shares} {one.bounded:8.2f} {one.seeds:7.2f}", flush=True)
