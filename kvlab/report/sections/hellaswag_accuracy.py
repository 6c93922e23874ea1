"""HellaSwag: accuracy with its error over items, and item-by-item comparisons."""

from kvlab.analysis.statistics import ItemComparison
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Heading,
    Row,
    Section,
    Table,
    Tone,
    cell,
    paragraph,
)
from kvlab.report.formatting import (
    PLUS_MINUS,
    format_fixed,
    format_metric,
    format_p_value,
    format_signed,
)
from kvlab.report.hellaswag_outcomes import (
    COMPARED_METRICS,
    MAX_ITEMS,
    Outcomes,
    accuracy_error,
    all_at_chance,
    compare_with_baseline,
    exceeds_item_limit,
    largest_accuracy_error,
    read_outcomes,
)
from kvlab.report.table_columns import range_cell, simultaneous_column

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
    comparison = [_comparison_table(study, outcomes, metric) for metric in COMPARED_METRICS]
    tables = [table for table in comparison if table is not None]
    if tables:
        contents += [Heading("Item by item against the baseline"), paragraph(_METHOD), *tables]
    return Section("HellaSwag", tuple(contents))


_METHOD = (
    "Both cells answer the same items, so the items that only one of them gets right decide:"
    " McNemar's exact test with one seed. With several, an item counts once, by how many seeds more"
    " one of both gets it right, and all patterns of the signs of these numbers are counted. The"
    " interval inverts that test and is simultaneous for all cells of a table; a verdict is read"
    " from it. Both say how another draw of items would move the difference, not another draw of"
    " seeds. So a verdict is of these weights: whether the architecture does better, the effects"
    " over seeds say."
)


_TOO_MANY = (
    f"Cells are not compared item by item: there are more than {MAX_ITEMS:,} outcomes. Compare"
    " accuracies with the error over items in mind."
)


_CHANCE = (
    " No accuracy here is above chance by more than two of its standard errors: these models have"
    " not learned the task, so an order among them, or a front drawn through them, is no finding."
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


_ERROR = "error over items (points)"


def _comparison_table(study: Study, outcomes: Outcomes, metric: str) -> Table | None:
    comparisons: list[tuple[Levels, ItemComparison]] = []
    for levels in study.cells:
        if levels != study.baseline:
            comparison = compare_with_baseline(study, outcomes, metric, levels)
            if comparison is not None:
                comparisons.append((levels, comparison))
    if not comparisons:
        return None
    alpha = study.decide.alpha / len(comparisons)
    rows = tuple(_comparison_row(study, c, comparison, alpha) for c, comparison in comparisons)
    columns = (
        Column("cell"),
        Column("difference (points)", True),
        simultaneous_column(metric, study.decide.alpha, "over items, for all cells together"),
        Column("gained", True, "items that only this cell gets right, over all seeds"),
        Column("lost", True, "items that only the baseline gets right, over all seeds"),
        Column("p", True),
        Column("p (all cells)", True, "corrected for the cells of this table"),
        Column("these weights"),
    )
    sizes = {(comparison.items, comparison.seeds) for _, comparison in comparisons}
    sizes_text = " or ".join(f"{i:,} items at {format_count(s, 'seed')}" for i, s in sorted(sizes))
    caption = f"acc_norm {_SCORINGS[metric]}, against the baseline on {sizes_text}."
    return Table(f"hellaswag-{_SCORINGS[metric].split()[-1]}", caption, columns, rows)


def _comparison_row(study: Study, levels: Levels, comparison: ItemComparison, alpha: float) -> Row:
    low, high = comparison.interval(alpha)
    corrected_p = min(1.0, comparison.p * study.decide.alpha / alpha)
    is_significant = low > 0 or high < 0
    verdict = (
        ("more right" if comparison.difference > 0 else "fewer right")
        if is_significant
        else "within noise"
    )
    tone: Tone = ("good" if comparison.difference > 0 else "bad") if is_significant else "muted"
    return Row(
        (
            cell(study.label(levels)),
            cell(format_signed(100 * comparison.difference, 2), 100 * comparison.difference),
            range_cell("hellaswag_acc_norm", low, high),
            cell(f"{comparison.gained:,}", comparison.gained),
            cell(f"{comparison.lost:,}", comparison.lost),
            cell(format_p_value(comparison.p), comparison.p),
            cell(format_p_value(corrected_p), corrected_p),
            cell(verdict, tone=tone),
        ),
        study.cell_key(levels),
    )
