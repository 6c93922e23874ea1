"""HellaSwag and tasks of lm-eval: accuracy with its error over items, and item by item."""

import math
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
from kvlab.report.formatting import (
    PLUS_MINUS,
    format_fixed,
    format_metric,
    in_display_unit,
    is_share,
)
from kvlab.report.hellaswag_outcomes import (
    MAX_ITEMS,
    Outcomes,
    accuracy_error,
    all_at_chance,
    exceeds_item_limit,
    largest_accuracy_error,
    read_outcomes,
)
from kvlab.report.item_tables import ITEM_METHOD, make_item_table
from kvlab.report.table_columns import mean_cell
from kvlab.store.metrics import LM_EVAL_PREFIX, METRICS

_ACCURACY_TITLES = {
    "hellaswag_acc": "acc",
    "hellaswag_acc_norm": "acc_norm",
    "hellaswag_acc_norm_served": "acc_norm served",
    "hellaswag_lmeval_acc_norm": "lm-eval acc_norm",
    "hellaswag_lmeval_acc_norm_served": "lm-eval acc_norm served",
}
_SCORINGS = {
    "hellaswag_acc_norm": "one-shot",
    "hellaswag_acc_norm_served": "through the serving cache",
}


def report_hellaswag(study: Study) -> Section | None:
    """List accuracies and compare every cell with the baseline on the same items."""
    metrics = [metric for metric in _ACCURACY_TITLES if metric in study.measured_metrics]
    if not metrics:
        return None
    contents: list[Content] = [
        paragraph(_describe_task(study, metrics)),
        _accuracy_table(study, metrics),
    ]
    if exceeds_item_limit(study):
        contents.append(paragraph(_TOO_MANY))
    outcomes = read_outcomes(study)
    comparison = [
        make_item_table(
            study, outcomes, metric, f"hellaswag-{scoring.split()[-1]}", f"acc_norm {scoring}"
        )
        for metric, scoring in _SCORINGS.items()
    ]
    tables = [table for table in comparison if table is not None]
    if tables:
        items: tuple[Content, ...] = (paragraph(ITEM_METHOD), *tables)
        contents.append(Fold("Item by item against the baseline", items))
    return Section("HellaSwag", tuple(contents), all_at_chance(study, metrics))


_TOO_MANY = (
    f"Cells are not compared item by item: there are more than {MAX_ITEMS:,} outcomes. Compare"
    " accuracies with the error over items in mind."
)


_CHANCE = (
    " No accuracy here is above chance by more than two of its standard errors. These models have"
    " not learned the task, so differences between them mean nothing."
)


def _describe_task(study: Study, metrics: list[str]) -> str:
    items = sorted({int(r.measurements.get("hellaswag_items", 0)) for r in study.done_rows} - {0})
    text = "Completion style scores the context alone; lm-eval style adds the activity label."
    if items:
        sizes = " or ".join(f"{size:,}" for size in items)
        text = f"{sizes} items a trial; chance is 25%. {text}"
    n_shortened = max(
        (r.measurements.get("hellaswag_shortened", 0) for r in study.done_rows), default=0
    )
    if n_shortened:
        text += (
            f" Up to {format_count(int(n_shortened), 'context')} had to be cut to fit the model."
        )
    largest = largest_accuracy_error(study, metrics)
    if largest is not None:
        largest_points = 100 * largest
        text += (
            f" One accuracy has a standard error of up to {format_fixed(largest_points, 2)} points"
            f" over items, so two cells that are not compared item by item must differ by about"
            f" {format_fixed(math.sqrt(8) * largest_points, 1)} points before that means anything."
        )
    if all_at_chance(study, metrics):
        text += _CHANCE
    return text


def _accuracy_table(study: Study, metrics: list[str]) -> Table:
    columns = (Column("cell"), *(_accuracy_column(_ACCURACY_TITLES[m]) for m in metrics))
    rows = []
    for levels in study.cells:
        entries = [_accuracy_cell(study, levels, metric) for metric in metrics]
        if any(entry is not EMPTY_CELL for entry in entries):
            rows.append(Row((cell(study.label(levels)), *entries), study.cell_key(levels)))
    caption = f"Mean over seeds {PLUS_MINUS} standard error over items (of one seed)."
    return Table("hellaswag", caption, columns, tuple(rows))


_ERROR = "error over items (points)"


def _accuracy_column(title: str) -> Column:
    return Column(f"{title} (%)", True, csv=(f"{title} (%)", f"{title} {_ERROR}"))


def _accuracy_cell(study: Study, levels: Levels, metric: str) -> Cell:
    mean, error = study.mean(levels, metric), accuracy_error(study, levels, metric)
    if mean is None:
        return EMPTY_CELL
    text = format_metric(metric, mean)
    if error is None:
        return Cell(text, 100 * mean, csv=(100 * mean, None))
    text += f" {PLUS_MINUS} {format_metric(metric, error)}"
    return Cell(text, 100 * mean, csv=(100 * mean, 100 * error))


# Tasks of lm-eval


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
    error = math.sqrt(max(0.0, mean * (1 - mean)) / (len(answered[0]) - 1))
    text = f"{format_metric(metric, mean)} {PLUS_MINUS} {format_metric(metric, error)}"
    value = in_display_unit(metric, mean)
    return Cell(text, value, csv=(value, in_display_unit(metric, error)))
