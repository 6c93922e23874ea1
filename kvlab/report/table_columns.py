"""Columns and cells of tables: means with their spread, intervals, effects and their aliases.

A cell holds the text that readers see and the unrounded numbers for the CSV.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from kvlab.analysis.effects import Effect, change_name
from kvlab.analysis.statistics import sum_squares
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import VERDICTS
from kvlab.report import formatting as fmt
from kvlab.report.document import EMPTY_CELL, Cell, Column, cell

MAX_NAMED_ALIASES = 8
"""Aliases named for one effect; the CSV of the table of effects has all of them."""

MAX_LISTED_SEEDS = 4
"""Differences are listed seed by seed up to this number of seeds."""

MAX_LISTED_CELLS = 3
"""Cells are named up to this number, and one more."""


def mean_column(title: str, unit: str = "", hint: str = "") -> Column:
    """Return a column of `mean_cell` cells; its CSV has the mean and its standard deviation.

    Args:
        title: The column's head.
        unit: Unit for the CSV, if the head does not name it.
        hint: Explanation of the head.
    """
    name, title_unit = _split_unit(title)
    unit = title_unit or unit
    return Column(title, True, hint, (_append_unit(name, unit), _append_unit(f"{name} sd", unit)))


def mean_cell(study: Study, levels: Levels, metric: str) -> Cell:
    """Return a cell's mean over seeds, with its standard deviation if there are several."""
    values = list(study.values(levels, metric).values())
    if not values:
        return EMPTY_CELL
    mean, spread = mean_and_spread(values)
    text = fmt.format_metric(metric, mean)
    if spread is not None:
        text += f" {fmt.PLUS_MINUS} {fmt.format_metric(metric, spread)}"
    value = fmt.in_display_unit(metric, mean)
    return Cell(
        text, value, csv=(value, None if spread is None else fmt.in_display_unit(metric, spread))
    )


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation; None for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(sum_squares(values, mean) / (len(values) - 1))


def range_column(
    title: str, unit: str = "", hint: str = "", ends: tuple[str, str] = ("low", "high")
) -> Column:
    """Return a column of pairs of numbers, such as intervals; it sorts by the first."""
    name, title_unit = _split_unit(title)
    csv = tuple(_append_unit(f"{name} {end}", title_unit or unit) for end in ends)
    return Column(title, True, hint, csv)


def range_cell(metric: str, low: float, high: float) -> Cell:
    """Return a cell of two differences of a metric, such as the ends of an interval."""
    ends = fmt.in_display_unit(metric, low), fmt.in_display_unit(metric, high)
    return Cell(fmt.format_interval(metric, low, high), ends[0], csv=ends)


def interval_column(metric: str, hint: str = "") -> Column:
    """Return a column of 95% intervals of a difference in a metric."""
    return range_column("95% CI", fmt.difference_unit(metric), hint)


def simultaneous_column(metric: str, alpha: float, hint: str = "") -> Column:
    """Return a column of intervals that hold for all rows of their table together."""
    title = f"simultaneous {100 * (1 - alpha):g}%"
    return range_column(title, fmt.difference_unit(metric), hint)


def difference_cell(metric: str, value: float) -> Cell:
    return Cell(fmt.format_difference(metric, value), fmt.in_display_unit(metric, value))


def interval_scope(study: Study) -> Literal["cells", "levels", "both"]:
    """Return what the intervals of cells against their references hold for together.

    A cell that differs from its reference as one level does has the interval of that effect.
    """
    is_effect = {found.effect is not None for found in study.comparisons.values()}
    return "both" if len(is_effect) > 1 else "levels" if True in is_effect else "cells"


_SCOPES = {
    "cells": "for all cells together",
    "levels": "for all levels together",
    "both": "for all cells together, or of a level's effect for all levels",
}


def reference_columns(study: Study) -> tuple[Column, ...]:
    """Return the columns of `reference_cells`: against what, the difference and what it says."""
    metric, unit = study.primary_metric, fmt.difference_unit(study.primary_metric)
    has_several = len(study.estimand.references) > 1
    title = "against it" if has_several else "against baseline"
    hint = f"of the difference, {_SCOPES[interval_scope(study)]}"
    reference = "the cell with the same levels of all factors that save no byte"
    named = (Column("compared with", hint=reference),) if has_several else ()
    effects = study.effects(metric)
    has_more_seeds = any(effect.error is not None and effect.error.shift for effect in effects)
    how = "of means over all seeds of each" if has_more_seeds else "paired by seed"
    return (
        *named,
        Column(f"{title} ({unit})" if unit else title, True, how),
        simultaneous_column(metric, study.decide.alpha, hint),
        Column("verdict"),
    )


def reference_cells(study: Study, levels: Levels) -> tuple[Cell, ...]:
    """Return a cell's reference, its primary metric minus the reference's, and what that says."""
    has_several = len(study.estimand.references) > 1
    found = study.comparisons.get(levels)
    if found is None:
        return (EMPTY_CELL,) * (4 if has_several else 3)
    metric, words = study.primary_metric, found.verdict
    if found.token_factor is not None and found.token_factor != 1.0:
        words += f", on {fmt.format_significant(found.token_factor, 4)}{fmt.TIMES} the tokens"
    if found.later is not None:
        words += f"; at all seeds {fmt.format_difference(metric, found.later.value)}"
    return (
        *((cell(study.label(found.reference), tone="muted"),) if has_several else ()),
        difference_cell(metric, found.value),
        range_cell(metric, found.low, found.high) if found.has_interval else EMPTY_CELL,
        cell(words, tone=VERDICTS[found.verdict_name].tone if found.verdict_name else ""),
    )


def size_factor(study: Study, levels: Levels) -> float | None:
    """Return by how much a cell's cache is smaller than its reference's; None if unknown."""
    own, other = study.kv_bytes(levels), study.kv_bytes(study.estimand.reference(levels))
    return other / own if own and other else None


def smaller_cell(study: Study, levels: Levels) -> Cell:
    """Return by how much a cell's cache is smaller than that of its reference."""
    factor = size_factor(study, levels)
    return cell(fmt.format_ratio(factor), factor) if factor else EMPTY_CELL


def verdict_words(name: str, margin: float | None) -> str:
    """Return the words of a verdict, such as ``costs less than 0.05``."""
    return VERDICTS[name].words.format(margin=f"{margin or 0.0:g}")


def names_cell(study: Study, cells: Sequence[Levels]) -> Cell:
    """Return the names of cells, of which many are counted; the CSV has them all."""
    if not cells:
        return EMPTY_CELL
    names = [study.label(levels) for levels in cells]
    return Cell(join_names(names), len(names), csv=("; ".join(names),))


def join_names(names: Sequence[str]) -> str:
    """Join names, and count those after the first `MAX_LISTED_CELLS`."""
    listed = names if len(names) <= MAX_LISTED_CELLS + 1 else names[:MAX_LISTED_CELLS]
    text, rest = ", ".join(listed), len(names) - len(listed)
    return f"{text} and {rest:,} more" if rest else text


def divergence_columns(study: Study) -> tuple[Column, ...]:
    """Return the column of `divergence_cells`; none if no trial diverged."""
    hint = "trials that diverged, of all; such a cell is never the best"
    column = Column("diverged", True, hint, ("diverged", "trials"))
    return (column,) if study.diverged_cells else ()


def divergence_cells(study: Study, levels: Levels) -> tuple[Cell, ...]:
    if not study.diverged_cells:
        return ()
    count, total = study.diverged_cells.get(levels, 0), len(study.cells[levels])
    text = f"{count} of {total}" if count else "0"
    return (Cell(text, count, "bad" if count else "muted", csv=(count, total)),)


def size_column(title: str, hint: str = "") -> Column:
    """Return a column of `size_cell` cells; its CSV has exact bytes."""
    return Column(title, True, hint, (f"{title} (bytes)",))


def size_cell(count: int) -> Cell:
    """Return a cell of exact bytes."""
    return Cell(fmt.format_binary_size(count), count)


def value_cell(metric: str, value: float) -> Cell:
    return Cell(fmt.format_metric(metric, value), fmt.in_display_unit(metric, value))


def title_with_unit(metric: str, title: str) -> str:
    """Return a head with its metric's unit, such as ``loss (nats/token)``."""
    return _append_unit(title, fmt.display_unit(metric))


def _split_unit(title: str) -> tuple[str, str]:
    """Split ``loss (nats/token)`` into its name and unit."""
    name, bracket, rest = title.partition(" (")
    return (name, rest.removesuffix(")")) if bracket and rest.endswith(")") else (title, "")


def _append_unit(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


# Effects and interactions


def groups_column() -> Column:
    hint = "independent conditions, and seeds"
    return Column(f"groups {fmt.TIMES} seeds", True, hint, ("groups", "seeds"))


def groups_cell(effect: Effect) -> Cell:
    groups, seeds = effect.groups, len(effect.seeds)
    return Cell(f"{groups} {fmt.TIMES} {seeds}", groups, csv=(groups, seeds))


def simultaneous_cell(effect: Effect) -> Cell:
    """Return the interval that the verdict is read from, if the effect was tested fairly."""
    if not effect.has_interval:
        return EMPTY_CELL
    return range_cell(effect.metric, effect.low, effect.high)


def csv_only(column: Column) -> Column:
    """Return a column that is in the CSV alone."""
    return replace(column, is_csv_only=True)


def own_interval_cell(effect: Effect) -> Cell:
    """Return the interval of the effect's own paired t-test, for this effect alone."""
    if effect.estimate is None or not effect.is_tested:
        return EMPTY_CELL
    return range_cell(effect.metric, effect.estimate.low, effect.estimate.high)


def verdict_cell(effect: Effect) -> Cell:
    return cell(effect.verdict, tone=VERDICTS[effect.verdict_name].tone)


def diverged_column() -> Column:
    hint = "pairs in which only the level, and only its partner, diverged"
    return Column("diverged", True, hint, ("diverged", "partner diverged"))


def diverged_cell(effect: Effect) -> Cell:
    found = effect.divergence
    if found is None:
        return Cell("0", 0, csv=(0, 0))
    text = f"{found.level} of {found.pairs}, partner {found.partner}"
    return Cell(text, found.level, "bad" if found.level else "", csv=(found.level, found.partner))


def p_cell(effect: Effect, p: float) -> Cell:
    """Return one p-value of an effect, if it was tested."""
    return Cell(fmt.format_p_value(p), p) if effect.is_tested else EMPTY_CELL


def detectable_column(unit: str, hint: str) -> Column:
    return Column("detectable", True, hint, (f"detectable ({unit})",))


def detectable_cell(effect: Effect) -> Cell:
    size = effect.detectable
    if size is None:
        return EMPTY_CELL
    return Cell(fmt.format_magnitude(effect.metric, size), fmt.in_display_unit(effect.metric, size))


def settings_cell(effect: Effect) -> Cell:
    """Return the smallest and the largest difference of a setting."""
    values = [value for _, value in effect.by_setting]
    return range_cell(effect.metric, min(values), max(values)) if len(values) > 1 else EMPTY_CELL


def seeds_column(seeds: tuple[int, ...], unit: str) -> Column:
    """Return a column of `seeds_cell` cells; its CSV has the difference at every seed."""
    csv = tuple(f"difference at seed {seed} ({unit})" for seed in seeds)
    return Column("by seed", True, "mean difference at each seed", csv)


def seeds_cell(effect: Effect, seeds: tuple[int, ...]) -> Cell:
    """Return the difference at each seed, or with many seeds how many are above zero."""
    by_seed = dict(effect.by_seed)
    csv = tuple(
        fmt.in_display_unit(effect.metric, by_seed[s]) if s in by_seed else None for s in seeds
    )
    if len(by_seed) <= MAX_LISTED_SEEDS:
        text = ", ".join(fmt.format_difference(effect.metric, value) for value in by_seed.values())
        return Cell(text, max(by_seed.values(), default=None), csv=csv)
    positive = sum(value > 0 for value in by_seed.values())
    return Cell(f"{positive} of {len(by_seed)} above 0", positive, csv=csv)


def pairs_column() -> Column:
    hint = "matched pairs used, of those in the design"
    return Column("pairs", True, hint, ("pairs used", "pairs designed"))


def pairs_cell(effect: Effect) -> Cell:
    """Return how many pairs were used. A contrast has seeds instead of pairs."""
    used, designed = effect.pairs_used, effect.pairs_designed
    unit = " seeds" if effect.is_contrast else ""
    csv = (None, None) if effect.is_contrast else (used, designed)
    return Cell(f"{used} of {designed}{unit}", used, csv=csv)


def name_aliases(effect: Effect, separator: str) -> str:
    """Return the first `MAX_NAMED_ALIASES` aliases of an effect, and how many more there are."""
    more = len(effect.aliases) - MAX_NAMED_ALIASES
    names = separator.join(map(change_name, effect.aliases[:MAX_NAMED_ALIASES]))
    return f"{names} and {more} more" if more > 0 else names


def alias_cell(effect: Effect) -> Cell:
    if not effect.aliases:
        return EMPTY_CELL
    names = "; ".join(map(change_name, effect.aliases))
    return Cell(name_aliases(effect, "; "), names)
