"""Columns and cells of tables: means with their spread, intervals, sizes and what differs.

A cell holds the text that readers see and the unrounded numbers for the CSV.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from kvlab.analysis.cell_comparisons import CellComparison
from kvlab.analysis.effects import Effect, change_name
from kvlab.analysis.statistics import sum_squares
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import VERDICTS
from kvlab.humanize import format_bytes
from kvlab.report import formatting as fmt
from kvlab.report.document import EMPTY_CELL, Cell, Column, Entries, Table, cell, make_table
from kvlab.store.metrics import METRICS

MAX_NAMED_ALIASES = 8
"""Aliases named for one effect; the CSV of the table of effects has all of them."""

MAX_LISTED_CELLS = 3
"""Cells are named up to this number, and one more."""


def cells_table(
    study: Study,
    name: str,
    caption: str,
    entries: Callable[[Levels], Entries],
    cells: Iterable[Levels] | None = None,
) -> Table:
    """Return a table of one row for each cell of the design.

    Args:
        entries: Returns a cell's columns after its name. A cell without any value is left out.
    """
    rows: list[tuple[Entries, str]] = []
    for levels in study.cells if cells is None else cells:
        found = tuple(entries(levels))
        if any(entry[1] is not EMPTY_CELL for entry in found):
            rows.append(((("cell", study.label(levels)), *found), study.cell_key(levels)))
    return make_table(name, caption, rows)


def csv_only(column: Column | str) -> Column:
    """Return a column that is in the CSV alone."""
    return replace(Column(column) if isinstance(column, str) else column, is_csv_only=True)


# Means and other numbers


def mean_column(title: str, unit: str = "", hint: str = "") -> Column:
    """Return a column of `mean_cell` cells; its CSV has the mean and its standard deviation.

    Args:
        unit: Unit for the CSV, if the head does not name it.
    """
    name, title_unit = _split_unit(title)
    unit = title_unit or unit
    return Column(title, True, hint, (with_unit(name, unit), with_unit(f"{name} sd", unit)))


def mean_cell(study: Study, levels: Levels, metric: str) -> Cell:
    """Return a cell's mean over seeds, with its standard deviation if there are several."""
    return spread_cell(metric, list(study.values(levels, metric).values()))


def spread_cell(
    metric: str,
    values: Sequence[float],
    show: Callable[[str, float], str] = fmt.format_metric,
    show_spread: Callable[[str, float], str] = fmt.format_metric,
) -> Cell:
    """Return a mean of a metric with its standard deviation; empty without values."""
    return error_cell(metric, *mean_and_spread(values), show, show_spread) if values else EMPTY_CELL


def error_cell(
    metric: str,
    mean: float,
    error: float | None,
    show: Callable[[str, float], str] = fmt.format_metric,
    show_error: Callable[[str, float], str] = fmt.format_metric,
) -> Cell:
    """Return a mean of a metric with its error or its spread, if there is one."""
    text, value = show(metric, mean), fmt.in_display_unit(metric, mean)
    if error is None:
        return Cell(text, value, csv=(value, None))
    text += f" {fmt.PLUS_MINUS} {show_error(metric, error)}"
    return Cell(text, value, csv=(value, fmt.in_display_unit(metric, error)))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation; None for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(sum_squares(values, mean) / (len(values) - 1))


def number_cell(value: float | None, show: Callable[[float], str]) -> Cell:
    """Return a cell of a number that may be absent."""
    return EMPTY_CELL if value is None else cell(show(value), value)


def value_cell(metric: str, value: float) -> Cell:
    return Cell(fmt.format_metric(metric, value), fmt.in_display_unit(metric, value))


def size_column(title: str, hint: str = "") -> Column:
    """Return a column of `size_cell` cells; its CSV has exact bytes."""
    return Column(title, True, hint, (f"{title} (bytes)",))


def size_cell(count: int | None) -> Cell:
    """Return a cell of exact bytes."""
    return number_cell(count, format_bytes)


def text_metric(study: Study, loss: float) -> tuple[str, float] | None:
    """Return a loss of the primary metric as bits per byte or perplexity; None of other metrics."""
    if METRICS[study.primary_metric].unit != "nats/token":
        return None
    if study.tokenizers == {"bytes"}:
        return "bits/byte", loss / math.log(2)
    return "perplexity", math.exp(min(loss, 700.0))


# Differences and their intervals


def range_column(
    title: str, unit: str = "", hint: str = "", ends: tuple[str, str] = ("low", "high")
) -> Column:
    """Return a column of pairs of numbers, such as intervals; it sorts by the first."""
    name, title_unit = _split_unit(title)
    csv = tuple(with_unit(f"{name} {end}", title_unit or unit) for end in ends)
    return Column(title, True, hint, csv)


def range_cell(metric: str, low: float, high: float) -> Cell:
    """Return a cell of two differences of a metric, such as the ends of an interval."""
    ends = fmt.in_display_unit(metric, low), fmt.in_display_unit(metric, high)
    return Cell(fmt.format_interval(metric, low, high), ends[0], csv=ends)


def simultaneous_column(metric: str, alpha: float, hint: str = "") -> Column:
    """Return a column of intervals that hold for all rows of their table together."""
    title = f"simultaneous {fmt.format_confidence(alpha)}"
    return range_column(title, fmt.difference_unit(metric), hint)


def simultaneous_cell(metric: str, found: Effect | CellComparison) -> Cell:
    """Return the interval that the verdict is read from, if there was a fair test."""
    return range_cell(metric, found.low, found.high) if found.has_interval else EMPTY_CELL


def verdict_cell(effect: Effect) -> Cell:
    return cell(effect.verdict, tone=VERDICTS[effect.verdict_name].tone)


def difference_cell(metric: str, value: float) -> Cell:
    return Cell(fmt.format_difference(metric, value), fmt.in_display_unit(metric, value))


def magnitude_cell(metric: str, value: float | None) -> Cell:
    """Return a cell of the magnitude of a difference that may be absent."""
    if value is None:
        return EMPTY_CELL
    return Cell(fmt.format_magnitude(metric, value), fmt.in_display_unit(metric, value))


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


def reference_entries(study: Study, levels: Levels) -> Entries:
    """Yield a cell's reference, its primary metric minus the reference's, and what that says."""
    metric, found = study.primary_metric, study.comparisons.get(levels)
    against = difference = interval = verdict = EMPTY_CELL
    if found is not None:
        words = found.verdict
        if found.token_factor is not None and found.token_factor != 1.0:
            words += f", on {fmt.format_significant(found.token_factor, 4)}{fmt.TIMES} the tokens"
        if found.later is not None:
            words += f"; at all seeds {fmt.format_difference(metric, found.later.value)}"
        against = cell(study.label(found.reference), tone="muted")
        difference = difference_cell(metric, found.value)
        interval = simultaneous_cell(metric, found)
        tone = VERDICTS[found.verdict_name].tone if found.verdict_name else ""
        verdict = cell(words, tone=tone)
    title = "against baseline"
    if len(study.estimand.references) > 1:
        hint = "the cell with the same levels of all factors that save no byte"
        yield Column("compared with", hint=hint), against
        title = "against it"
    has_more_seeds = any(one.error and one.error.shift for one in study.effects(metric))
    how = "of means over all seeds of each" if has_more_seeds else "paired by seed"
    yield Column(with_unit(title, fmt.difference_unit(metric)), True, how), difference
    hint = f"of the difference, {_SCOPES[interval_scope(study)]}"
    yield simultaneous_column(metric, study.decide.alpha, hint), interval
    yield Column("verdict", hint="of this cell; a level's is in the table of effects"), verdict


def cache_entries(study: Study, levels: Levels) -> Entries:
    """Yield the size of a cell's cache, and by how much it is smaller than its reference's."""
    size = size_column("K/V cache", "one sequence at block size")
    yield size, size_cell(study.kv_bytes(levels))
    smaller = number_cell(study.size_factor(levels), fmt.format_ratio)
    yield Column("smaller", True, "the reference's KV bytes divided by the cell's"), smaller


# Heads and names


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


def metric_title(metric: str) -> str:
    """Return a metric's short title with its unit, such as ``served loss (nats/token)``."""
    return with_unit(fmt.short_title(metric), fmt.display_unit(metric))


def with_unit(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


def _split_unit(title: str) -> tuple[str, str]:
    """Split ``loss (nats/token)`` into its name and unit."""
    name, bracket, rest = title.partition(" (")
    return (name, rest.removesuffix(")")) if bracket and rest.endswith(")") else (title, "")


# Effects


def groups_entry(effect: Effect) -> tuple[Column, Cell]:
    groups, seeds = effect.groups, len(effect.seeds)
    hint = "independent conditions, and seeds"
    column = Column(f"groups {fmt.TIMES} seeds", True, hint, ("groups", "seeds"))
    return csv_only(column), Cell(f"{groups} {fmt.TIMES} {seeds}", groups, csv=(groups, seeds))


def name_aliases(effect: Effect, separator: str) -> str:
    """Return the first `MAX_NAMED_ALIASES` aliases of an effect, and how many more there are."""
    more = len(effect.aliases) - MAX_NAMED_ALIASES
    names = separator.join(map(change_name, effect.aliases[:MAX_NAMED_ALIASES]))
    return f"{names} and {more} more" if more > 0 else names
