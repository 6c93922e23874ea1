"""Columns and cells of effects that the tables of effects and interactions share."""

from kvlab.report.effects import Effect
from kvlab.report.numbers import TIMES, difference, distance, in_unit, p_value
from kvlab.report.quantities import range_cell
from kvlab.report.section import EMPTY, Cell, Column

MOST_SEEDS = 4
"""Differences are listed seed by seed up to this many seeds."""


def groups_column() -> Column:
    hint = "independent conditions, and seeds"
    return Column(f"groups {TIMES} seeds", True, hint, ("groups", "seeds"))


def groups_cell(effect: Effect) -> Cell:
    groups, seeds = effect.groups, len(effect.seeds)
    return Cell(f"{groups} {TIMES} {seeds}", groups, csv=(groups, seeds))


def interval_cell(effect: Effect) -> Cell:
    if effect.estimate is None or not effect.tested:
        return EMPTY
    return range_cell(effect.metric, effect.estimate.low, effect.estimate.high)


def p_cell(effect: Effect, p: float) -> Cell:
    """One p-value of an effect, if it was tested."""
    return Cell(p_value(p), p) if effect.tested else EMPTY


def detectable_column(unit: str, hint: str) -> Column:
    return Column("detectable", True, hint, (f"detectable ({unit})",))


def detectable_cell(effect: Effect) -> Cell:
    size = effect.detectable
    if size is None:
        return EMPTY
    return Cell(distance(effect.metric, size), in_unit(effect.metric, size))


def settings_cell(effect: Effect) -> Cell:
    """The smallest and the largest of its settings' differences."""
    values = [value for _, value in effect.by_setting]
    return range_cell(effect.metric, min(values), max(values)) if len(values) > 1 else EMPTY


def seeds_column(seeds: tuple[int, ...], unit: str) -> Column:
    """The CSV has every seed's difference, also where there are too many to list."""
    names = tuple(f"difference at seed {seed} ({unit})" for seed in seeds)
    return Column("by seed", True, "mean difference at each seed", names)


def seeds_cell(effect: Effect, seeds: tuple[int, ...]) -> Cell:
    found = dict(effect.by_seed)
    values = tuple(in_unit(effect.metric, found[s]) if s in found else None for s in seeds)
    if len(found) <= MOST_SEEDS:
        text = ", ".join(difference(effect.metric, value) for value in found.values())
        return Cell(text, max(found.values(), default=None), csv=values)
    up = sum(value > 0 for value in found.values())
    return Cell(f"{up} of {len(found)} above 0", up, csv=values)


def pairs_column() -> Column:
    hint = "matched pairs used, of those in the design"
    return Column("pairs", True, hint, ("pairs used", "pairs designed"))


def pairs_cell(effect: Effect) -> Cell:
    """A contrast over all cells has seeds, not pairs."""
    used, designed = effect.comparisons, effect.designed
    unit = " seeds" if effect.by_contrast else ""
    numbers = (None, None) if effect.by_contrast else (used, designed)
    return Cell(f"{used} of {designed}{unit}", used, csv=numbers)
