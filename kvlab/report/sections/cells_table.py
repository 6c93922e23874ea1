"""The ablation table: mean and spread over seeds of every cell."""

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.document import EMPTY_CELL, Cell, Column, Row, Section, Table, cell, paragraph
from kvlab.report.formatting import (
    PLUS_MINUS,
    difference_unit,
    format_mebibytes,
    format_megabytes,
    format_ratio,
    short_title,
)
from kvlab.report.table_columns import (
    difference_cell,
    interval_column,
    mean_cell,
    mean_column,
    range_cell,
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
        " paired: cell minus baseline at the same seed, then averaged; its 95% interval is a"
        " t interval over the seeds alone, so with two or three seeds it is wide; it is for this"
        " cell alone, and of many cells one in twenty lies outside. For what a level does, read"
        " the effects below, which use all matched pairs.",
    )
    columns = [Column(factor) for factor in study.factors]
    columns += [
        Column("n", True, "trials measured"),
        Column("KV MB", True, "10^6 bytes, one sequence at block size"),
        Column("KV MiB", True, "2^20 bytes, one sequence at block size"),
        Column("smaller", True, "the baseline's KV bytes divided by the cell's"),
        mean_column(title_with_unit(metric, short_title(metric)), hint=METRICS[metric].title),
        *_one_shot_columns(study),
        Column(f"against baseline ({difference_unit(metric)})", True, "paired by seed"),
        interval_column(metric, "of the difference, over seeds"),
    ]
    rows = tuple(_row(study, levels, metric) for levels in study.cells)
    caption = f"{format_count(len(rows), 'cell')}; the baseline is the first."
    return Section("Cells", (note, Table("cells", caption, tuple(columns), rows)))


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
        *_size_cells(study, levels),
        *means,
        *_difference_cells(study, levels, metric),
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


def _difference_cells(study: Study, levels: Levels, metric: str) -> tuple[Cell, Cell]:
    estimate = study.baseline_difference(levels)
    if estimate is None:
        return EMPTY_CELL, EMPTY_CELL
    value = difference_cell(metric, estimate.value)
    if estimate.kind != "tested":
        return value, EMPTY_CELL
    return value, range_cell(metric, estimate.low, estimate.high)
