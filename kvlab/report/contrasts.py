"""Main effects of a fractional design, in which no two cells differ in one factor alone.

At each seed a factor's contrast is the mean over the cells with its level minus the mean over
those with its baseline level (Box, Hunter and Hunter, Statistics for Experimenters, ch. 6). It
measures the effect averaged over the levels of the others, plus what the design's aliasing says.
"""

from kvlab.report.effects import Cells, Effect, Factors, corrected
from kvlab.report.statistics.grouped import estimate


def contrast_effects(cells: Cells, factors: Factors, metric: str) -> list[Effect]:
    """One effect for every two-level factor, Holm-corrected together.

    A seed at which some cell is missing is left out: the others alone would be out of balance.
    """
    seeds = sorted({seed for rows in cells.values() for seed in rows})
    values = {
        seed: {levels: rows[seed].measurements[metric] for levels, rows in cells.items()}
        for seed in seeds
        if all(
            seed in rows and rows[seed].done and metric in rows[seed].measurements
            for rows in cells.values()
        )
    }
    effects = []
    for place, (factor, levels) in enumerate(factors.items()):
        for level in levels[1:]:
            by_seed = {seed: _contrast(found, place, level) for seed, found in values.items()}
            effects.append(_effect(metric, factor, level, by_seed, values, len(seeds)))
    return corrected(effects)


def _contrast(found: dict[tuple[str, ...], float], place: int, level: str) -> float:
    on = [value for levels, value in found.items() if levels[place] == level]
    off = [value for levels, value in found.items() if levels[place] != level]
    return sum(on) / len(on) - sum(off) / len(off)


def _effect(
    metric: str,
    factor: str,
    level: str,
    by_seed: dict[int, float],
    values: dict[int, dict[tuple[str, ...], float]],
    designed: int,
) -> Effect:
    scale = max((abs(v) for found in values.values() for v in found.values()), default=1.0)
    differences = list(by_seed.values())
    mean = sum(differences) / len(differences) if differences else 0.0
    return Effect(
        metric,
        ((factor, level),),
        estimate([differences], scale) if differences else None,
        comparisons=len(differences),
        designed=designed,
        settings=min(1, len(differences)),
        groups=min(1, len(differences)),
        seeds=tuple(by_seed),
        by_seed=tuple(by_seed.items()),
        by_setting=(((), mean),) if differences else (),
        limits=(),
    )
