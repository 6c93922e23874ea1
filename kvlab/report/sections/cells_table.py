"""The table of cells: mean and spread over seeds of every cell."""

import math

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Fold,
    Row,
    Section,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import PLUS_MINUS, format_significant, short_title
from kvlab.report.table_columns import (
    csv_only,
    divergence_cells,
    divergence_columns,
    interval_scope,
    mean_cell,
    mean_column,
    reference_cells,
    reference_columns,
    size_cell,
    size_column,
    smaller_cell,
    title_with_unit,
)
from kvlab.store.metrics import METRICS

MAX_OPEN_ROWS = 24
"""Rows of a table that is not folded."""


def report_cells(study: Study) -> Section | None:
    """List every cell with its KV bytes, its loss and its difference from the baseline."""
    if not study.done_rows:
        return None
    table = _table(study)
    is_open = len(table.rows) <= MAX_OPEN_ROWS
    contents: tuple[Content, ...] = (
        paragraph(
            f"Mean {PLUS_MINUS} standard deviation over n seeds. The difference is paired: cell"
            f" minus {_reference(study)} at the same seed, then averaged."
        ),
        table if is_open else Fold(format_count(len(table.rows), "cell"), (table,)),
        Fold("What the intervals hold for", (paragraph(_describe_intervals(study)),)),
    )
    return Section("Cells", contents)


def _reference(study: Study) -> str:
    return "its reference" if len(study.estimand.references) > 1 else "baseline"


def _table(study: Study) -> Table:
    metric = study.primary_metric
    columns = [Column(factor) for factor in study.factors]
    columns += [
        Column("n", True, "trials measured"),
        *divergence_columns(study),
        size_column("K/V cache", "one sequence at block size"),
        Column("smaller", True, "the reference's KV bytes divided by the cell's"),
        mean_column(title_with_unit(metric, short_title(metric)), hint=METRICS[metric].title),
        *_text_columns(study),
        *_one_shot_columns(study),
        *reference_columns(study),
    ]
    rows = tuple(_row(study, levels, metric) for levels in study.cells)
    caption = f"{format_count(len(rows), 'cell')}; the baseline is the first."
    return Table("cells", caption, tuple(columns), rows)


def _describe_intervals(study: Study) -> str:
    """Say what the intervals of the differences hold for, and what their error is."""
    scope, confidence = interval_scope(study), f"{100 * (1 - study.decide.alpha):g}%"
    if scope == "levels":
        return (
            f"In this design a cell's difference from {_reference(study)} is what a level does, so"
            f" it has the interval of that effect: {confidence} for all levels together."
        )
    text = (
        f"The intervals hold for all cells together with {confidence} probability, so also for a"
        " cell that is picked from the table. They are estimated and judged as the effects are:"
        " their error is the larger of the cell's own over seeds and one that is pooled over cells."
        " Cells that share trained weights, or are served otherwise than they were trained, keep"
        " their own."
    )
    if scope == "both":
        text += (
            " A cell whose difference is the effect of a level has the interval of that effect,"
            " which holds for all levels together."
        )
    return f"{text} The effects use all matched pairs, so their intervals are narrower."


def _text_columns(study: Study) -> list[Column]:
    """Return the column of bits per byte or perplexity, if the primary metric is a loss."""
    if METRICS[study.primary_metric].unit != "nats/token":
        return []
    if study.tokenizers == {"bytes"}:
        return [Column("bits/byte", True, "the loss divided by ln 2: a token is a byte")]
    return [Column("perplexity", True, "exp of the loss per token")]


def _text_cells(study: Study, levels: Levels) -> list[Cell]:
    if not _text_columns(study):
        return []
    loss = study.mean(levels, study.primary_metric)
    if loss is None:
        return [EMPTY_CELL]
    value = loss / math.log(2) if study.tokenizers == {"bytes"} else math.exp(min(loss, 700.0))
    return [cell(format_significant(value, 4), value)]


def _one_shot_columns(study: Study) -> list[Column]:
    """Return the column of the one-shot loss, if the primary metric is the served one."""
    metric = study.one_shot_metric
    if metric == study.primary_metric:
        return []
    title, info = short_title(metric), METRICS[metric]
    return [csv_only(mean_column(title, info.unit, info.title))]


def _row(study: Study, levels: Levels, metric: str) -> Row:
    values = study.values(levels, metric)
    level_pairs = zip(levels, study.baseline, strict=True)
    names = [cell(name, tone="muted" if name == base else "") for name, base in level_pairs]
    one_shot = study.one_shot_metric
    count = cell(str(len(values)), len(values), "" if values else "muted")
    entries = (
        *names,
        count,
        *divergence_cells(study, levels),
        *_size_cells(study, levels),
        mean_cell(study, levels, metric),
        *_text_cells(study, levels),
        *([mean_cell(study, levels, one_shot)] if one_shot != metric else []),
        *reference_cells(study, levels),
    )
    return Row(entries, study.cell_key(levels), "" if values else "muted")


def _size_cells(study: Study, levels: Levels) -> tuple[Cell, Cell]:
    stored = study.kv_bytes(levels)
    return (EMPTY_CELL if stored is None else size_cell(stored)), smaller_cell(study, levels)
