"""HellaSwag and tasks of lm-eval: accuracy with its error over items, and item by item."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from kvlab.analysis.statistics import ItemComparison
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import hellaswag_outcomes as hellaswag
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.store.metrics import LM_EVAL_PREFIX, METRICS

_ACCURACY_TITLES = {
    "hellaswag_acc": "acc",
    "hellaswag_acc_norm": "acc_norm",
    "hellaswag_acc_norm_served": "acc_norm served",
    "hellaswag_lmeval_acc_norm": "lm-eval acc_norm",
    "hellaswag_lmeval_acc_norm_served": "lm-eval acc_norm served",
}


def report_hellaswag(study: Study) -> doc.Section | None:
    """List accuracies and compare every cell with the baseline on the same items."""
    metrics = [metric for metric in _ACCURACY_TITLES if metric in study.measured_metrics]
    if not metrics:
        return None

    def entries(levels: Levels) -> doc.Entries:
        for metric in metrics:
            title, mean = _ACCURACY_TITLES[metric], study.mean(levels, metric)
            heads = (f"{title} (%)", f"{title} error over items (points)")
            error = hellaswag.accuracy_error(study, levels, metric)
            yield doc.Column(heads[0], True, csv=heads), _share_cell(metric, mean, error)

    caption = f"Mean over seeds {fmt.PLUS_MINUS} standard error over items (of one seed)."
    table = cols.cells_table(study, "hellaswag", caption, entries)
    contents: list[doc.Content] = [doc.paragraph(_describe_task(study, metrics)), table]
    if hellaswag.exceeds_item_limit(study):
        contents.append(doc.paragraph(texts.fill("too many items", most=hellaswag.MAX_ITEMS)))
    outcomes = hellaswag.read_outcomes(study)
    titles = {
        "hellaswag_acc_norm": ("hellaswag-one-shot", "acc_norm one-shot"),
        "hellaswag_acc_norm_served": ("hellaswag-cache", "acc_norm through the serving cache"),
    }
    contents += _compare_items(study, outcomes, titles, "Item by item against the baseline")
    return doc.Section("HellaSwag", tuple(contents), hellaswag.all_at_chance(study, metrics))


def _share_cell(metric: str, mean: float | None, error: float | None) -> doc.Cell:
    """Return a mean with its error over items."""
    if mean is None:
        return doc.EMPTY_CELL
    text, value = fmt.format_metric(metric, mean), fmt.in_display_unit(metric, mean)
    if error is None:
        return doc.Cell(text, value, csv=(value, None))
    text += f" {fmt.PLUS_MINUS} {fmt.format_metric(metric, error)}"
    return doc.Cell(text, value, csv=(value, fmt.in_display_unit(metric, error)))


def _describe_task(study: Study, metrics: list[str]) -> str:
    items = sorted({int(r.measurements.get("hellaswag_items", 0)) for r in study.done_rows} - {0})
    text = "Completion style scores the context alone; lm-eval style adds the activity label."
    if items:
        sizes = " or ".join(f"{size:,}" for size in items)
        text = f"{sizes} items a trial; chance is 25%. {text}"
    shortened = [r.measurements.get("hellaswag_shortened", 0) for r in study.done_rows]
    if n_shortened := int(max(shortened, default=0)):
        text += f" Up to {format_count(n_shortened, 'context')} had to be cut to fit the model."
    largest = hellaswag.largest_accuracy_error(study, metrics)
    if largest is not None:
        text += " " + texts.fill(
            "error over items",
            error=fmt.format_fixed(100 * largest, 2),
            least=fmt.format_fixed(math.sqrt(8) * 100 * largest, 1),
        )
    if hellaswag.all_at_chance(study, metrics):
        text += " " + texts.fill("accuracies at chance")
    return text


# Tasks of lm-eval


def report_lm_eval(study: Study) -> doc.Section | None:
    """List the tasks' metrics and compare every cell with the baseline on the same items."""
    names = [name for name in study.measured_metrics if name.startswith(LM_EVAL_PREFIX)]
    metrics = [name for name in names if METRICS[name].unit != "items"]
    if not metrics:
        return None
    outcomes, n_dropped = _read_outcomes(study, metrics)
    listed = []
    for name in names:
        if METRICS[name].unit == "items":
            task = name.removeprefix(LM_EVAL_PREFIX).removesuffix("_items")
            count = max(int(row.measurements.get(name, 0)) for row in study.done_rows)
            listed.append(f"{task} ({format_count(count, 'item')})")
    text = f"Scored by EleutherAI's lm-eval: {', '.join(listed)}."
    if n_dropped:
        trials = format_count(n_dropped, "trial")
        text += f" {trials} answered other items than the baseline and are not compared by item."

    def entries(levels: Levels) -> doc.Entries:
        for metric in metrics:
            unit = "%" if fmt.is_share(metric) else METRICS[metric].unit
            title = f"{METRICS[metric].title.removeprefix('lm-eval ')} ({unit})"
            mean, rows = study.mean(levels, metric), study.cells[levels].values()
            answers = [a for row in rows if (a := outcomes.get(metric, {}).get(row.trial))]
            cell = cols.mean_cell(study, levels, metric)
            if mean is not None and answers and len(answers[0]) > 1:
                error = math.sqrt(max(0.0, mean * (1 - mean)) / (len(answers[0]) - 1))
                cell = _share_cell(metric, mean, error)
            yield doc.Column(title, True, csv=(title, f"{title}, error")), cell

    caption = texts.fill("caption of lm-eval", sign=fmt.PLUS_MINUS)
    table = cols.cells_table(study, "lm-eval", caption, entries)
    contents: list[doc.Content] = [doc.paragraph(text), table]
    titles = {name: (name.replace("_", "-"), METRICS[name].title) for name in outcomes}
    contents += _compare_items(study, outcomes, titles, "Tasks, item by item")
    return doc.Section("Tasks of lm-eval", tuple(contents))


def _read_outcomes(study: Study, metrics: Sequence[str]) -> tuple[hellaswag.Outcomes, int]:
    """Return the outcomes that are right or wrong, by item.

    Trials that answered other items of a task than the baseline did are left out, and counted.
    """
    rows = {row.trial: row for row in study.done_rows}
    tasks_by_trial = {trial: study.store.tasks(row.trial) for trial, row in rows.items()}
    base = [row.trial for row in study.cells[study.baseline].values() if row.trial in rows]
    items: dict[str, str] = {}
    for trial in [*base, *tasks_by_trial]:
        for task, entry in tasks_by_trial[trial].items():
            items.setdefault(task, entry["items"])
    outcomes: hellaswag.Outcomes = {}
    dropped = set()
    for trial, tasks in tasks_by_trial.items():
        for task, entry in tasks.items():
            if entry["items"] != items[task]:
                dropped.add(trial)
                continue
            for metric, values in entry["outcomes"].items():
                if metric in metrics and fmt.is_share(metric) and set(values) <= {0, 1}:
                    outcomes.setdefault(metric, {})[trial] = bytes(map(int, values))
    return {metric: outcomes[metric] for metric in metrics if metric in outcomes}, len(dropped)


# Item by item


def _compare_items(
    study: Study,
    outcomes: hellaswag.Outcomes,
    titles: Mapping[str, tuple[str, str]],
    fold_title: str,
) -> list[doc.Content]:
    """Return a table for each metric that compares cells with the baseline on the same items.

    Args:
        study: The study.
        outcomes: Metric -> trial -> one byte per item, 0 or 1.
        titles: Metric -> name of its table, and what is compared.
        fold_title: Of the fold around the tables.
    """
    tables = []
    for metric, (name, title) in titles.items():
        found: dict[Levels, ItemComparison] = {}
        for levels in study.cells:
            compared = hellaswag.compare_with_baseline(study, outcomes, metric, levels)
            if levels != study.baseline and compared is not None:
                found[levels] = compared
        if not found:
            continue
        sizes = sorted({(one.items, one.seeds) for one in found.values()})
        on = " or ".join(f"{n:,} items at {format_count(seeds, 'seed')}" for n, seeds in sizes)
        caption, entries = f"{title}, against the baseline on {on}.", partial(_item_entries, study)
        rows = (
            doc.KeyedRow(entries(levels, one, len(found)), study.cell_key(levels))
            for levels, one in found.items()
        )
        tables.append(doc.make_table(name, caption, rows))
    if not tables:
        return []
    return [doc.Fold(fold_title, (doc.paragraph(texts.fill("items")), *tables))]


def _item_entries(study: Study, levels: Levels, one: ItemComparison, n_cells: int) -> doc.Entries:
    alpha = study.decide.alpha
    low, high = one.interval(alpha / n_cells)
    yield "cell", study.label(levels)
    difference = 100 * one.difference
    yield "difference (points)", doc.cell(fmt.format_signed(difference, 2), difference)
    accuracy = "hellaswag_acc_norm"
    hint = "over items, for all cells together"
    column = cols.simultaneous_column(accuracy, alpha, hint)
    yield column, cols.range_cell(accuracy, low, high)
    yield "gained", one.gained, "items that only this cell gets right, over all seeds"
    yield "lost", one.lost, "items that only the baseline gets right, over all seeds"
    yield "p", doc.cell(fmt.format_p_value(one.p), one.p)
    p = min(1.0, one.p * n_cells)
    hint = "corrected for the cells of this table"
    yield "p (all cells)", doc.cell(fmt.format_p_value(p), p), hint
    verdict = doc.cell("within noise", tone="muted")
    if low > 0:
        verdict = doc.cell("more right", tone="good")
    elif high < 0:
        verdict = doc.cell("fewer right", tone="bad")
    yield "these weights", verdict
