"""Sweeps with looks and without any effect, or with planted ones: how often is a claim wrong?

    python -m tests.extensions.looks.null_sweeps [--sweeps 10000] [--seed 0] [--only TEXT]

Each is one baseline and one cell a claim, looked at after some of the seeds. `Tally` is printed.
"""

from dataclasses import dataclass, fields

import numpy as np

from kvlab.analysis.verdicts import DIFFERENT, WORSE
from kvlab.extensions.looks.sequential import ClaimState, Looks
from tests.studies import read_options

Array = np.ndarray


@dataclass(frozen=True)
class Looked:
    """A kind of sweep with looks: a baseline and one cell a claim, which share its noise.

    Attributes:
        effects: True difference of each claim from the baseline, in deviations of one trial.
        spreads: Deviations of the cells, the baseline first: even on a scale of ratios.
        is_skewed: Whether losses have a long upper tail.
        margin: Of equivalence; None declares none.
        failing: Probability that a trial fails, whatever its loss.
        diverging: Share of the first level's trials that diverge: those of the highest loss.
        looks: Number of seeds at each look.
    """

    effects: tuple[float, ...]
    spreads: tuple[float, float] = (1.0, 1.0)
    is_skewed: bool = False
    margin: float | None = None
    failing: float = 0.0
    diverging: float = 0.0
    looks: tuple[int, ...] = (3, 5, 7, 10)


LOOKED = {
    "1 null": Looked((0.0,)),
    "5 nulls": Looked((0.0,) * 5),
    "18 nulls": Looked((0.0,) * 18),
    "5 nulls, looks 2,3,5,10": Looked((0.0,) * 5, looks=(2, 3, 5, 10)),
    "5 nulls, unequal spreads": Looked((0.0,) * 5, spreads=(0.35, 2.8)),
    "5 nulls, skewed": Looked((0.0,) * 5, is_skewed=True),
    "5 nulls, 15% failed": Looked((0.0,) * 5, failing=0.15),
    "5 nulls, worse half of one diverges": Looked((0.0,) * 5, diverging=0.5),
    "2 large, 3 nulls": Looked((5.0, 5.0, 0.0, 0.0, 0.0)),
    "2 large, 3 nulls, margin 1.5": Looked((5.0, 5.0, 0.0, 0.0, 0.0), margin=1.5),
    "5 at the margin": Looked((1.5,) * 5, margin=1.5),
    "4 at the margin, 1 null": Looked((1.5,) * 4 + (0.0,), margin=1.5),
    "5 nulls, margin 3": Looked((0.0,) * 5, margin=3.0),
    "5 of 1.5": Looked((1.5,) * 5),
    "5 of 3": Looked((3.0,) * 5),
}


@dataclass
class Tally:
    """What sweeps with looks gave, as shares.

    Attributes:
        error: Sweeps with any wrong claim.
        coverage: Sweeps all of whose last intervals cover the true difference.
        power: Claims of a true difference that are called.
        bounded: Claims that are called no costlier than the margin.
        trials: Mean number of trials, as a share of those of the most seeds.
    """

    error: float
    coverage: float
    power: float
    bounded: float
    trials: float


def look(structure: Looked, sweeps: int, seed: int = 0) -> Tally:
    """Return what ``sweeps`` sweeps with looks give."""
    random = np.random.default_rng(seed)
    found = [_look_at_sweep(structure, random) for _ in range(sweeps)]
    return Tally(*np.mean(found, axis=0).tolist())


def _look_at_sweep(structure: Looked, random: np.random.Generator) -> tuple[float, ...]:
    """Simulate one sweep; return the values of a `Tally`."""
    effects, maximum = np.array(structure.effects), structure.looks[-1]
    shape = (len(effects) + 1, maximum)
    noise = random.gamma(2.0, 1.0, shape) / 2**0.5 if structure.is_skewed else None
    losses = random.standard_normal(shape) if noise is None else noise
    losses = losses * np.geomspace(*structure.spreads, shape[0])[:, None]
    has_ended = random.random(shape) >= structure.failing
    if structure.diverging:
        has_ended[1] &= losses[1] <= np.quantile(losses[1], 1 - structure.diverging)
    losses[1:] += effects[:, None]
    paired, differences = has_ended[0] & has_ended[1:], losses[1:] - losses[0]
    names = [str(number) for number in range(len(effects))]
    looks = Looks(structure.looks, len(effects), margin=structure.margin)
    states = {name: ClaimState() for name in names}
    seeds = np.zeros(shape[0], dtype=int)
    for size in structure.looks:
        is_open = [states[name].is_open for name in names]
        seeds[[any(is_open), *is_open]] = size
        if not any(is_open):
            break
        so_far = {
            name: differences[row, : seeds[row + 1]][paired[row, : seeds[row + 1]]].tolist()
            for row, name in enumerate(names)
        }
        states = looks.take(states, so_far, {"0": WORSE} if structure.diverging else {})
    wrong, covered, called = False, True, 0
    for state, effect in zip(states.values(), structure.effects, strict=True):
        is_called = state.outcome in DIFFERENT
        wrong |= is_called and (effect == 0.0 or (effect > 0) != state.outcome.startswith("worse"))
        wrong |= state.outcome in ("bounded", "worse within") and effect >= (structure.margin or 0)
        covered &= state.low <= effect <= state.high
        called += is_called and effect != 0.0
    real = max(1, np.count_nonzero(effects))
    bounded = sum(state.outcome == "bounded" for state in states.values()) / len(states)
    return wrong, covered, called / real, bounded, seeds.sum() / seeds.size / maximum


def main() -> None:
    options = read_options(__doc__, sweeps=10_000, seed=0, only="")
    print(f"{'':40}", *(f"{field.name:>9}" for field in fields(Tally)))
    for name, looked in LOOKED.items():
        if options.only in name:
            values = vars(look(looked, options.sweeps, options.seed)).values()
            print(f"{name:40}", *(f"{value:9.3f}" for value in values), flush=True)


if __name__ == "__main__":
    main()
