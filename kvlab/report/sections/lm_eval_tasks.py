"""Tasks of lm-eval: every cell's numbers, and item-by-item comparisons with the baseline."""

from collections.abc import Sequence

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
from kvlab.report.formatting import PLUS_MINUS, format_metric, in_display_unit, is_share
from kvlab.report.hellaswag_outcomes import Outcomes
from kvlab.report.item_tables import ITEM_METHOD, make_item_table
from kvlab.report.table_columns import mean_cell
from kvlab.store.metrics import LM_EVAL_PREFIX, METRICS


def report_lm_eval(study: Study) -> Section | None:
    """List the tasks' metrics and compare every cell with the baseline on the same items."""
    metrics = [
        metric
        for metric in study.measured_metrics
        if metric.startswith(LM_EVAL_PREFIX) and METRICS[metric].unit != "items"
    ]
    if not metrics:
        return None
    outcomes, dropped = _read_outcomes(study, metrics)
    contents: list[Content] = [paragraph(_describe_tasks(study, dropped))]
    contents.append(_metrics_table(study, metrics, outcomes))
    tables = [
        make_item_table(study, outcomes, metric, metric.replace("_", "-"), METRICS[metric].title)
        for metric in outcomes
    ]
    shown = [table for table in tables if table is not None]
    if shown:
        contents.append(Fold("Tasks, item by item", (paragraph(ITEM_METHOD), *shown)))
    return Section("Tasks of lm-eval", tuple(contents))


def _read_outcomes(study: Study, metrics: Sequence[str]) -> tuple[Outcomes, int]:
    """Return the outcomes that are right or wrong, by item.

    Trials that answered other items of a task than the baseline did are left out, and counted.
    """
    rows = {row.trial: row for row in study.done_rows}
    tasks_by_trial = {trial: study.read_tasks(row) for trial, row in rows.items()}
    base = [row.trial for row in study.cells[study.baseline].values() if row.trial in rows]
    items: dict[str, str] = {}
    for trial in [*base, *tasks_by_trial]:
        for task, entry in tasks_by_trial[trial].items():
            items.setdefault(task, entry["items"])
    outcomes: Outcomes = {}
    dropped = set()
    for trial, tasks in tasks_by_trial.items():
        for task, entry in tasks.items():
            if entry["items"] != items[task]:
                dropped.add(trial)
                continue
            for metric, values in entry["outcomes"].items():
                if metric in metrics and is_share(metric) and set(values) <= {0, 1}:
                    outcomes.setdefault(metric, {})[trial] = bytes(map(int, values))
    return {metric: outcomes[metric] for metric in metrics if metric in outcomes}, len(dropped)


def _describe_tasks(study: Study, dropped: int) -> str:
    counts: dict[str, int] = {}
    for row in study.done_rows:
        for name, value in row.measurements.items():
            if name.startswith(LM_EVAL_PREFIX) and METRICS[name].unit == "items":
                task = name.removeprefix(LM_EVAL_PREFIX).removesuffix("_items")
                counts[task] = max(counts.get(task, 0), int(value))
    listed = ", ".join(f"{task} ({format_count(n, 'item')})" for task, n in counts.items())
    text = f"Scored by EleutherAI's lm-eval: {listed}."
    if dropped:
        trials = format_count(dropped, "trial")
        text += f" {trials} answered other items than the baseline and are not compared by item."
    return text


def _metrics_table(study: Study, metrics: Sequence[str], outcomes: Outcomes) -> Table:
    columns = [Column("cell")]
    for metric in metrics:
        title = METRICS[metric].title.removeprefix("lm-eval ")
        title += " (%)" if is_share(metric) else f" ({METRICS[metric].unit})"
        columns.append(Column(title, True, csv=(title, f"{title}, error")))
    rows = []
    for levels in study.cells:
        entries = [_metric_cell(study, levels, metric, outcomes) for metric in metrics]
        if any(entry is not EMPTY_CELL for entry in entries):
            rows.append(Row((cell(study.label(levels)), *entries), study.cell_key(levels)))
    caption = (
        f"Mean over seeds {PLUS_MINUS} standard error over items (of one seed) where items are"
        " right or wrong, else the standard deviation over seeds."
    )
    return Table("lm-eval", caption, tuple(columns), tuple(rows))


def _metric_cell(study: Study, levels: Levels, metric: str, outcomes: Outcomes) -> Cell:
    mean = study.mean(levels, metric)
    answered = [
        outcomes[metric][row.trial]
        for row in study.cells[levels].values()
        if row.trial in outcomes.get(metric, {})
    ]
    if mean is None or not answered or len(answered[0]) < 2:
        return mean_cell(study, levels, metric)
    error = (max(0.0, mean * (1 - mean)) / (len(answered[0]) - 1)) ** 0.5
    text = f"{format_metric(metric, mean)} {PLUS_MINUS} {format_metric(metric, error)}"
    value = in_display_unit(metric, mean)
    return Cell(text, value, csv=(value, in_display_unit(metric, error)))
