"""Tasks and probes: HellaSwag, loss by position, and metrics that users' files define."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product

from kvlab.analysis.statistics import ItemComparison
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.own_extensions import find_members
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import hellaswag_outcomes as hellaswag
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.store.metrics import METRICS

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
            cell = doc.EMPTY_CELL if mean is None else cols.error_cell(metric, mean, error)
            yield doc.Column(heads[0], True, csv=heads), cell

    caption = f"Mean over seeds {fmt.PLUS_MINUS} standard error over items (of one seed)."
    table = cols.cells_table(study, "hellaswag", caption, entries)
    contents: list[doc.Content] = [_describe_task(study, metrics), table]
    outcomes = hellaswag.read_outcomes(study)
    titles = {
        "hellaswag_acc_norm": ("hellaswag-one-shot", "acc_norm one-shot"),
        "hellaswag_acc_norm_served": ("hellaswag-cache", "acc_norm through the serving cache"),
    }
    contents += compare_items(study, outcomes, titles, "Item by item against the baseline")
    return doc.Section("HellaSwag", tuple(contents), hellaswag.all_at_chance(study, metrics))


def _describe_task(study: Study, metrics: list[str]) -> doc.Paragraph:
    counts = {int(row.measurements.get("hellaswag_items", 0)) for row in study.done_rows}
    shortened = [row.measurements.get("hellaswag_shortened", 0) for row in study.done_rows]
    errors = [hellaswag.accuracy_error(study, levels, m) for m in metrics for levels in study.cells]
    largest, error, least = max((e for e in errors if e is not None), default=None), "", ""
    if largest is not None:
        error = fmt.format_fixed(100 * largest, 2)
        least = fmt.format_fixed(math.sqrt(8) * 100 * largest, 1)
    fields = {
        "sizes": [f"{size:,}" for size in sorted(counts - {0})],
        "n_shortened": int(max(shortened, default=0)),
        "is_at_chance": hellaswag.all_at_chance(study, metrics),
    }
    return texts.write("hellaswag", error=error, least=least, **fields)


# Item by item


def compare_items(
    study: Study,
    outcomes: hellaswag.Outcomes,
    titles: Mapping[str, tuple[str, str]],
    fold_title: str,
) -> list[doc.Content]:
    """Return a table for each metric that compares cells with the baseline on the same items.

    Args:
        outcomes: Metric -> trial -> one byte per item, 0 or 1.
        titles: Metric -> name of its table, and what is compared.
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
            (entries(levels, one, len(found)), study.cell_key(levels))
            for levels, one in found.items()
        )
        tables.append(doc.make_table(name, caption, rows))
    if not tables:
        return []
    return [doc.Fold(fold_title, (texts.write("items"), *tables))]


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


# Probes: those of extensions, and loss by position in the context

_POSITIONS = {f"loss_part{i}": f"{i}/8" for i in range(1, 9)} | {"loss_beyond": "beyond"}
_SCORINGS = {"": "one-shot", "_served": "served"}


def report_probes(study: Study) -> doc.Section | None:
    """Report what average loss hides: the probes of extensions, and the loss by position."""
    reports = find_members("probe_reports").values()
    contents: list[doc.Content] = [content for report in reports for content in report(study)]
    if "loss_part1" in study.measured_metrics:
        note = texts.write("positions", has_more="loss_beyond" in study.measured_metrics)
        heads = {metric: (head, "") for metric, head in _POSITIONS.items()}
        table = scored_table(study, "positions", "Nats a token by part of the context", heads)
        contents += [doc.Heading("Loss by position"), note, *_draw_positions(study), table]
    return doc.Section("Probes", tuple(contents)) if contents else None


def scored_table(
    study: Study, name: str, caption: str, heads: Mapping[str, tuple[str, str]]
) -> doc.Table:
    """Tabulate metrics of every cell, one-shot and served.

    Args:
        caption: Goes on with the number of seeds that each number is the mean over.
        heads: Metric -> head of its column and hint.
    """
    rows = []
    for levels, (ending, scoring) in product(study.cells, _SCORINGS.items()):
        entries = [
            (
                cols.mean_column(head, fmt.display_unit(metric), hint),
                cols.mean_cell(study, levels, f"{metric}{ending}"),
            )
            for metric, (head, hint) in heads.items()
            if metric in study.measured_metrics
        ]
        if any(entry is not doc.EMPTY_CELL for _, entry in entries):
            named: doc.Entries = (("cell", study.label(levels)), ("scored", scoring), *entries)
            rows.append((named, study.cell_key(levels)))
    caption += f", mean over {format_count(len(study.seeds), 'seed')}."
    if len(study.seeds) > 1:
        caption += f" {fmt.PLUS_MINUS} is the standard deviation."
    return doc.make_table(name, caption, rows)


def hint_counts(study: Study, metrics: Sequence[str], what: str) -> str:
    """Return how many of something the trials have, such as ``512 or 1,024 answers a trial``."""
    counts = {row.measurements.get(metric, 0) for row in study.done_rows for metric in metrics}
    return f"{' or '.join(f'{int(count):,}' for count in sorted(counts - {0}))} {what} a trial"


def _draw_positions(study: Study) -> Iterator[doc.Figure]:
    """Plot the cells that differ least from the baseline, as many as there are colours."""
    is_served = "loss_part1_served" in study.measured_metrics
    lines: list[doc.Line] = []
    for levels in sorted(study.cells, key=study.n_changed_factors):
        label, points = study.label(levels), []
        for part in range(1, 9):
            mean = study.mean(levels, f"loss_part{part}{'_served' if is_served else ''}")
            if mean is not None:
                tip = (label, f"eighth {part} of 8", f"loss {fmt.format_metric('loss', mean)}")
                points.append(doc.Point(float(part), mean, tip, study.cell_key(levels)))
        if points and len(lines) < len(doc.SERIES):
            lines.append(doc.draw_series(len(lines), label, points))
    if not lines:
        return
    caption = (
        f"Loss by part of the context, {'through the serving cache' if is_served else 'one-shot'}:"
        f" {format_count(len(lines), 'line')} of {format_count(len(study.cells), 'cell')}."
    )
    plot = doc.Plot(doc.Axis("eighth of the context"), doc.Axis("loss (nats/token)"), tuple(lines))
    yield doc.Figure("positions", caption, f"{caption} {doc.describe_ends(lines)}", plot)


# Metrics of users' files


def report_own_metrics(study: Study) -> doc.Section | None:
    """Report the mean of each metric in each cell, one-shot and served."""
    names = [name for name in study.measured_metrics if METRICS.is_offered(name)]
    if not names:
        return None

    def entries(levels: Levels) -> doc.Entries:
        for name in names:
            unit = fmt.display_unit(name)
            column = cols.mean_column(cols.with_unit(METRICS[name].title, unit), unit, f"`{name}`")
            yield column, cols.mean_cell(study, levels, name)

    caption = f"Means over {format_count(len(study.seeds), 'seed')}"
    caption += f" {fmt.PLUS_MINUS} standard deviation." if len(study.seeds) > 1 else "."
    table = cols.cells_table(study, "own-metrics", caption, entries)
    return doc.Section("Metrics of extensions", (texts.write("own metrics"), table))
