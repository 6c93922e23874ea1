"""HellaSwag: accuracy with its error over items, and item-by-item comparisons."""

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
)
from kvlab.report.hellaswag_outcomes import (
    MAX_ITEMS,
    accuracy_error,
    all_at_chance,
    exceeds_item_limit,
    largest_accuracy_error,
    read_outcomes,
)
from kvlab.report.item_tables import ITEM_METHOD, make_item_table

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
            f" {format_fixed(2 * 2**0.5 * largest_points, 1)} points before that means anything."
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
