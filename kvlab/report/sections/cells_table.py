"""The ablation table: mean and spread over seeds of every cell."""

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.document import EMPTY_CELL, Cell, Column, Row, Section, Table, cell, paragraph
from kvlab.report.formatting import (
    PLUS_MINUS,
    format_mebibytes,
    format_megabytes,
    format_ratio,
    short_title,
)
from kvlab.report.table_columns import (
    baseline_difference_cells,
    baseline_difference_columns,
    divergence_cells,
    divergence_columns,
    interval_scope,
    mean_cell,
    mean_column,
    title_with_unit,
)
from kvlab.store.metrics import METRICS


def report_cells(study: Study) -> Section | None:
    """List every cell with its KV bytes, its loss and its difference from the baseline."""
    if not study.done_rows:
        return None
    metric = study.primary_metric
    note = paragraph(
        f"Mean {PLUS_MINUS} standard deviation over n seeds (none with one). The difference is"
        " paired: cell minus baseline at the same seed, then averaged."
        f"{_describe_intervals(study)}",
    )
    columns = [Column(factor) for factor in study.factors]
    columns += [
        Column("n", True, "trials measured"),
        *divergence_columns(study),
        Column("KV MB", True, "10^6 bytes, one sequence at block size"),
        Column("KV MiB", True, "2^20 bytes, one sequence at block size"),
        Column("smaller", True, "the baseline's KV bytes divided by the cell's"),
        mean_column(title_with_unit(metric, short_title(metric)), hint=METRICS[metric].title),
        *_one_shot_columns(study),
        *baseline_difference_columns(study),
    ]
    rows = tuple(_row(study, levels, metric) for levels in study.cells)
    caption = f"{format_count(len(rows), 'cell')}; the baseline is the first."
    return Section("Cells", (note, Table("cells", caption, tuple(columns), rows)))


def _describe_intervals(study: Study) -> str:
    """Say what the intervals of the differences hold for, and what their error is."""
    scope, confidence = interval_scope(study), f"{100 * (1 - study.decide.alpha):g}%"
    if scope == "levels":
        return (
            " In this design that is what a level does, so its interval is the one of the effects"
            f" below: {confidence} for all levels together, also for one that is picked from the"
            " table."
        )
    text = (
        f" Its {confidence} intervals hold for all cells together, so also for one that is picked"
        " from the table; with two or three seeds they are wide. Their error is the larger of the"
        f" cell's own over seeds and the average of all cells{_OWN}."
    )
    if scope == "both":
        text += (
            " A cell whose difference is what a level does has the interval of that effect instead,"
            " which holds for all levels together: one comparison has one verdict."
        )
    return f"{text} For what a level does, read the effects below, which use all matched pairs."


_OWN = " (of cells that share trained weights: its own)"


def _one_shot_columns(study: Study) -> list[Column]:
    """Return the column of the one-shot loss, if the primary metric is the served one."""
    metric = study.one_shot_metric
    title, info = short_title(metric), METRICS[metric]
    return [mean_column(title, info.unit, info.title)] if metric != study.primary_metric else []


def _row(study: Study, levels: Levels, metric: str) -> Row:
    values = study.values(levels, metric)
    level_pairs = zip(levels, study.baseline, strict=True)
    names = [cell(name, tone="muted" if name == base else "") for name, base in level_pairs]
    means = [mean_cell(study, levels, metric)]
    if metric != study.one_shot_metric:
        means.append(mean_cell(study, levels, study.one_shot_metric))
    count = cell(str(len(values)), len(values), "" if values else "muted")
    entries = (
        *names,
        count,
        *divergence_cells(study, levels),
        *_size_cells(study, levels),
        *means,
        *baseline_difference_cells(study, levels),
    )
    return Row(entries, study.cell_key(levels), "" if values else "muted")


def _size_cells(study: Study, levels: Levels) -> tuple[Cell, ...]:
    stored, base = study.kv_bytes(levels), study.kv_bytes(study.baseline)
    if stored is None:
        return EMPTY_CELL, EMPTY_CELL, EMPTY_CELL
    ratio = cell(format_ratio(base / stored), base / stored) if base else EMPTY_CELL
    return (
        cell(format_megabytes(stored), stored / 10**6),
        cell(format_mebibytes(stored), stored / 2**20),
        ratio,
    )
