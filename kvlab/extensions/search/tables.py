"""What the sections of a search share: its numbers and its settings as text and in tables."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.analysis.search_results import SearchResults, SuggestedTrial
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import TrialRow
from kvlab.extensions.search.optuna_sampler import limit_violations
from kvlab.humanize import format_bytes, format_number
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.spec.search_config import Limit, format_setting, short_keys

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
    return cols.with_unit(objective_title(name), objective_unit(name))


def in_objective_unit(name: str, value: float) -> float:
    """Convert a value to the unit of `objective_unit`."""
    return value if name in _PLANNED else fmt.in_display_unit(name, value)


def _is_size(name: str) -> bool:
    return objective_unit(name) == "bytes"


def format_objective(name: str, value: float) -> str:
    """Format a value of an objective; only bytes have their unit, as KiB or MiB."""
    if _is_size(name):
        return format_bytes(value)
    if name == "training_flops":
        return format_number(value)
    return f"{value:,.0f}" if name in _PLANNED else fmt.format_metric(name, value)


def format_with_unit(name: str, value: float) -> str:
    unit = "" if _is_size(name) else objective_unit(name)
    return f"{format_objective(name, value)} {unit}" if unit else format_objective(name, value)


def format_named(name: str, value: float) -> str:
    """Return the title of an objective and its value, such as ``served loss 2.4 nats/token``."""
    return f"{objective_title(name)} {format_with_unit(name, value)}"


def describe_limits(search: SearchResults) -> str:
    """Return the limits in words, such as ``kv_bytes at most 32,768``."""
    return " and ".join(
        f"{objective_title(name)} {key.replace('_', ' ')} {format_with_unit(name, bound)}"
        for name, limit in search.config["limits"].items()
        for key, bound in limit.items()
        if bound is not None
    )


def base_row(study: Study) -> TrialRow | None:
    """Return the trial of the base experiment, if it is done."""
    return next((row for row in study.cells.get(study.baseline, {}).values() if row.is_done), None)


def objective_of_row(name: str, row: TrialRow) -> float | None:
    """Return a trial's value of an objective or a limit, None if it has none."""
    sizes = {"kv_bytes": "bytes_at_block_size", "kv_bytes_per_token": "bytes_per_token"}
    if name in sizes:
        value = row.record.get("kv", {}).get(sizes[name])
    elif name in _PLANNED:
        value = row.record.get("model", {}).get(name)
    else:
        value = row.measurements.get(name)
    return None if value is None else float(value)


def breaks_limit(search: SearchResults, row: TrialRow) -> bool:
    """Return whether a trial is beyond any limit of the search."""
    limits = {name: Limit(**bounds) for name, bounds in search.config["limits"].items()}
    values = {name: v for name in limits if (v := objective_of_row(name, row)) is not None}
    return any(violation > 0 for violation in limit_violations(limits, values).values())


def row_of(study: Study, one: SuggestedTrial) -> TrialRow | None:
    """Return the row of a suggestion's trial."""
    return next(iter(study.cells.get((one.level,), {}).values()), None)


def cell_key(study: Study, one: SuggestedTrial) -> str:
    """Return the key that links the rows and the marks of one trial."""
    return study.cell_key((one.level,)) if (one.level,) in study.cells else ""


# Tables


def settings_entries(search: SearchResults, settings: Mapping[str, Any]) -> doc.Entries:
    """Yield a column for each varied key."""
    for key, name in short_keys(search.keys).items():
        choices = search.config["choices"].get(key, ())
        is_numeric = all(isinstance(value, int | float) for value in choices)
        shown = doc.EMPTY_CELL
        if key in settings:
            value = settings[key]
            is_scalar = isinstance(value, str | int | float | bool)
            shown = doc.Cell(format_setting(value), value if is_scalar else json.dumps(value))
        yield doc.Column(name, is_numeric, key if name != key else ""), shown


def objective_entry(name: str, value: float | None) -> tuple[doc.Column, doc.Cell]:
    if _is_size(name):
        size = cols.size_cell(None if value is None else round(value))
        return cols.size_column(objective_title(name)), size
    shown = doc.EMPTY_CELL
    if value is not None:
        shown = doc.cell(format_objective(name, value), in_objective_unit(name, value))
    return doc.Column(title_with_unit(name), True), shown


def trials_table(
    study: Study, search: SearchResults, name: str, caption: str, trials: Sequence[SuggestedTrial]
) -> doc.Table:
    """Return a table of measured trials: number, objectives and limits, settings, id.

    The base experiment comes last, as it is what the trials are compared with.
    """
    objectives = (objective.name for objective in search.objectives)
    shown = tuple(dict.fromkeys((*objectives, *search.config["limits"], "kv_bytes")))

    def entries(
        label: doc.Cell, row: TrialRow | None, settings: Mapping[str, Any], trial: str
    ) -> doc.Entries:
        yield doc.Column("trial", True), label
        for objective in shown:
            value = None if row is None else objective_of_row(objective, row)
            yield objective_entry(objective, value)
        yield from settings_entries(search, settings)
        yield doc.Column("id"), doc.Cell(trial[:8], trial)

    rows: list[doc.KeyedRow] = []
    for one in trials:
        label = doc.cell(str(one.number), one.number)
        found = entries(label, row_of(study, one), one.settings, one.trial)
        rows.append((found, cell_key(study, one)))
    base = base_row(study)
    if base is not None:
        settings: dict[str, Any] = {}  # what the base experiment has for the varied keys
        for key in search.keys:
            value: Any = base.record.get("experiment", {})
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                settings[key] = value
        found = entries(doc.cell("base"), base, settings, base.trial)
        rows.append((found, study.cell_key(study.baseline), True))
    return doc.make_table(name, caption, rows)
