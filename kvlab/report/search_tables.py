"""What the sections of a search share: its numbers and its settings as text and in tables."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from kvlab.analysis.search_results import SearchResults, SuggestedTrial
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import TrialRow
from kvlab.humanize import format_number
from kvlab.report import formatting as fmt
from kvlab.report.document import EMPTY_CELL, Cell, Column, Row, Table, cell
from kvlab.report.table_columns import size_cell, size_column
from kvlab.spec.search_config import format_setting, short_keys

_PLANNED = {
    "parameters": ("parameters", ""),
    "kv_bytes": ("KV cache of one sequence", "bytes"),
    "kv_bytes_per_token": ("KV cache per token", "bytes"),
    "training_flops": ("training FLOPs", ""),
}
"""Title and unit of the numbers that are known before a trial runs."""


def objective_title(name: str) -> str:
    return _PLANNED[name][0] if name in _PLANNED else fmt.short_title(name)


def objective_unit(name: str) -> str:
    return _PLANNED[name][1] if name in _PLANNED else fmt.display_unit(name)


def title_with_unit(name: str) -> str:
    """Return the head of a column or an axis, such as ``served loss (nats/token)``."""
    unit = objective_unit(name)
    return f"{objective_title(name)} ({unit})" if unit else objective_title(name)


def in_objective_unit(name: str, value: float) -> float:
    """Convert a value to the unit of `objective_unit`."""
    return value if name in _PLANNED else fmt.in_display_unit(name, value)


def _is_size(name: str) -> bool:
    return objective_unit(name) == "bytes"


def format_objective(name: str, value: float) -> str:
    """Format a value of an objective; only bytes have their unit, as KiB or MiB."""
    if _is_size(name):
        return fmt.format_binary_size(value)
    if name == "training_flops":
        return format_number(value)
    return f"{value:,.0f}" if name in _PLANNED else fmt.format_metric(name, value)


def format_with_unit(name: str, value: float) -> str:
    unit = "" if _is_size(name) else objective_unit(name)
    return f"{format_objective(name, value)} {unit}" if unit else format_objective(name, value)


def describe_limits(search: SearchResults) -> str:
    """Return the limits in words, such as ``kv_bytes at most 32,768``."""
    words = {"at_most": "at most", "at_least": "at least"}
    return " and ".join(
        f"{objective_title(name)} {words[key]} {format_with_unit(name, bound)}"
        for name, limit in search.config["limits"].items()
        for key, bound in limit.items()
        if bound is not None
    )


def base_row(study: Study) -> TrialRow | None:
    """Return the trial of the base experiment, if it is done."""
    return next((row for row in study.cells.get(study.baseline, {}).values() if row.is_done), None)


def objective_of_row(name: str, row: TrialRow) -> float | None:
    """Return a trial's value of an objective or a limit, None if it has none."""
    record = row.record
    if name in ("kv_bytes", "kv_bytes_per_token"):
        key = "bytes_at_block_size" if name == "kv_bytes" else "bytes_per_token"
        value = record.get("kv", {}).get(key)
    elif name in ("parameters", "training_flops"):
        value = record.get("model", {}).get(name)
    else:
        value = row.measurements.get(name)
    return None if value is None else float(value)


def breaks_limit(search: SearchResults, row: TrialRow) -> bool:
    """Return whether a trial is beyond any limit of the search."""
    for name, limit in search.config["limits"].items():
        value = objective_of_row(name, row)
        if value is not None:
            low, high = limit.get("at_least"), limit.get("at_most")
            if (low is not None and value < low) or (high is not None and value > high):
                return True
    return False


def row_of(study: Study, one: SuggestedTrial) -> TrialRow | None:
    """Return the row of a suggestion's trial."""
    return next(iter(study.cells.get((one.level,), {}).values()), None)


def cell_key(study: Study, one: SuggestedTrial) -> str:
    """Return the key that links the rows and the marks of one trial."""
    return study.cell_key((one.level,)) if (one.level,) in study.cells else ""


# Tables


def settings_columns(search: SearchResults) -> tuple[Column, ...]:
    """Return one column for each varied key."""
    columns = []
    for key, name in short_keys(search.keys).items():
        choices = search.config["choices"].get(key, ())
        is_numeric = all(isinstance(value, int | float) for value in choices)
        columns.append(Column(name, is_numeric, key if name != key else ""))
    return tuple(columns)


def settings_cells(search: SearchResults, one: SuggestedTrial) -> tuple[Cell, ...]:
    return tuple(
        _setting_cell(one.settings[key]) if key in one.settings else EMPTY_CELL
        for key in search.keys
    )


def _setting_cell(value: Any) -> Cell:
    is_scalar = isinstance(value, str | int | float | bool)
    return Cell(format_setting(value), value if is_scalar else json.dumps(value))


def objective_column(name: str) -> Column:
    """Return a column of `objective_cell` cells."""
    if _is_size(name):
        return size_column(objective_title(name))
    return Column(title_with_unit(name), True)


def objective_cell(name: str, value: float | None) -> Cell:
    if value is None:
        return EMPTY_CELL
    if _is_size(name):
        return size_cell(round(value))
    return cell(format_objective(name, value), in_objective_unit(name, value))


def trials_table(
    study: Study, search: SearchResults, name: str, caption: str, trials: Sequence[SuggestedTrial]
) -> Table:
    """Return a table of measured trials: number, objectives and limits, settings, id.

    The base experiment comes last, as it is what the trials are compared with.
    """
    objectives = (objective.name for objective in search.objectives)
    shown = tuple(dict.fromkeys((*objectives, *search.config["limits"], "kv_bytes")))
    rows = []
    for one in trials:
        row = row_of(study, one)
        cells = [cell(str(one.number), one.number), *_shown_cells(shown, row)]
        cells += [*settings_cells(search, one), Cell(one.trial[:8], one.trial)]
        rows.append(Row(tuple(cells), cell_key(study, one)))
    base = base_row(study)
    if base is not None:
        cells = [cell("base"), *_shown_cells(shown, base)]
        cells += [_base_setting(base, key) for key in search.keys]
        cells.append(Cell(base.trial[:8], base.trial))
        rows.append(Row(tuple(cells), study.cell_key(study.baseline), "muted"))
    columns = (
        Column("trial", True),
        *map(objective_column, shown),
        *settings_columns(search),
        Column("id"),
    )
    return Table(name, caption, columns, tuple(rows))


def _shown_cells(shown: Sequence[str], row: TrialRow | None) -> Iterator[Cell]:
    for name in shown:
        yield objective_cell(name, None if row is None else objective_of_row(name, row))


def _base_setting(base: TrialRow, key: str) -> Cell:
    """Return what the base experiment has for a varied key."""
    value: Any = base.record.get("experiment", {})
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return EMPTY_CELL
        value = value[part]
    return EMPTY_CELL if value is None or isinstance(value, dict) else _setting_cell(value)
