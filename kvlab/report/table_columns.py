"""Columns and cells of measured quantities: what people read, and the numbers for the CSV."""

from collections.abc import Sequence
from dataclasses import replace

from kvlab.report.effects import Effect, change_name
from kvlab.report.formatting import (
    PLUS_MINUS,
    TIMES,
    difference_unit,
    display_unit,
    format_difference,
    format_magnitude,
    format_metric,
    format_p_value,
    in_display_unit,
)
from kvlab.report.section import EMPTY_CELL, Cell, Column, Row


def mean_column(title: str, unit: str = "", hint: str = "", csv_title: str = "") -> Column:
    """A column of `mean_cell`. ``unit`` is only for the CSV, if the head does not say it.

    Args:
        csv_title: of the CSV's columns, where the head alone does not say what it is.
    """
    name, known = _split_unit(csv_title or title)
    unit = known or unit
    return Column(title, True, hint, (_append_unit(name, unit), _append_unit(f"{name} sd", unit)))


def mean_cell(metric: str, values: Sequence[float]) -> Cell:
    """The mean over seeds, and from two on its standard deviation."""
    if not values:
        return EMPTY_CELL
    mean, spread = mean_and_spread(values)
    text = format_metric(metric, mean)
    if spread is not None:
        text += f" {PLUS_MINUS} {format_metric(metric, spread)}"
    value, sd = (
        in_display_unit(metric, mean),
        None if spread is None else in_display_unit(metric, spread),
    )
    return Cell(text, value, csv=(value, sd))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (n - 1); None for a single value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5


def range_column(
    title: str, unit: str = "", hint: str = "", ends: tuple[str, str] = ("low", "high")
) -> Column:
    """A column of pairs of numbers, such as an interval; it sorts by the first."""
    name, known = _split_unit(title)
    names = tuple(_append_unit(f"{name} {end}", known or unit) for end in ends)
    return Column(title, True, hint, names)


def range_cell(metric: str, low: float, high: float) -> Cell:
    """Two differences of a metric's values: the ends of an interval."""
    ends = in_display_unit(metric, low), in_display_unit(metric, high)
    return Cell(
        f"{format_difference(metric, low)} to {format_difference(metric, high)}", ends[0], csv=ends
    )


def interval_column(metric: str, hint: str = "") -> Column:
    """The 95% interval of a difference in a metric."""
    return range_column("95% CI", difference_unit(metric), hint)


def difference_cell(metric: str, value: float) -> Cell:
    return Cell(format_difference(metric, value), in_display_unit(metric, value))


def value_cell(metric: str, value: float) -> Cell:
    return Cell(format_metric(metric, value), in_display_unit(metric, value))


def title_with_unit(metric: str, title: str) -> str:
    """A head with its metric's unit."""
    return _append_unit(title, display_unit(metric))


def _split_unit(title: str) -> tuple[str, str]:
    """``loss (nats/token)`` as its name and unit."""
    name, bracket, rest = title.partition(" (")
    return (name, rest.removesuffix(")")) if bracket and rest.endswith(")") else (title, "")


def _append_unit(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


# Columns and cells of effects that the tables of effects and interactions share.


MAX_LISTED_SEEDS = 4
"""Differences are listed seed by seed up to this many seeds."""


def groups_column() -> Column:
    hint = "independent conditions, and seeds"
    return Column(f"groups {TIMES} seeds", True, hint, ("groups", "seeds"))


def groups_cell(effect: Effect) -> Cell:
    groups, seeds = effect.groups, len(effect.seeds)
    return Cell(f"{groups} {TIMES} {seeds}", groups, csv=(groups, seeds))


def interval_cell(effect: Effect) -> Cell:
    if effect.estimate is None or not effect.tested:
        return EMPTY_CELL
    return range_cell(effect.metric, effect.estimate.low, effect.estimate.high)


def p_cell(effect: Effect, p: float) -> Cell:
    """One p-value of an effect, if it was tested."""
    return Cell(format_p_value(p), p) if effect.tested else EMPTY_CELL


def detectable_column(unit: str, hint: str) -> Column:
    return Column("detectable", True, hint, (f"detectable ({unit})",))


def detectable_cell(effect: Effect) -> Cell:
    size = effect.detectable
    if size is None:
        return EMPTY_CELL
    return Cell(format_magnitude(effect.metric, size), in_display_unit(effect.metric, size))


def settings_cell(effect: Effect) -> Cell:
    """The smallest and the largest of its settings' differences."""
    values = [value for _, value in effect.by_setting]
    return range_cell(effect.metric, min(values), max(values)) if len(values) > 1 else EMPTY_CELL


def seeds_column(seeds: tuple[int, ...], unit: str) -> Column:
    """The CSV has every seed's difference, also where there are too many to list."""
    names = tuple(f"difference at seed {seed} ({unit})" for seed in seeds)
    return Column("by seed", True, "mean difference at each seed", names)


def seeds_cell(effect: Effect, seeds: tuple[int, ...]) -> Cell:
    found = dict(effect.by_seed)
    values = tuple(in_display_unit(effect.metric, found[s]) if s in found else None for s in seeds)
    if len(found) <= MAX_LISTED_SEEDS:
        text = ", ".join(format_difference(effect.metric, value) for value in found.values())
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


# The column of a table of effects that names what each is aliased with, if any is.


def append_aliases(
    columns: tuple[Column, ...], rows: tuple[Row, ...], effects: Sequence[Effect]
) -> tuple[tuple[Column, ...], tuple[Row, ...]]:
    """The columns and rows, one row an effect, with what it is aliased with at the end."""
    if not any(effect.aliases for effect in effects):
        return columns, rows
    column = Column("aliased with", hint="a part of these is in the difference")
    longer = zip(rows, effects, strict=True)
    return (*columns, column), tuple(
        replace(row, cells=(*row.cells, _alias_cell(effect))) for row, effect in longer
    )


def _alias_cell(effect: Effect) -> Cell:
    listed = "; ".join(map(change_name, effect.aliases))
    return Cell(listed, listed) if listed else EMPTY_CELL
