"""Tasks and probes: HellaSwag, associative recall, needles, and loss by position."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

from kvlab.analysis.statistics import ItemComparison
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import hellaswag_outcomes as hellaswag
from kvlab.report import table_columns as cols
from kvlab.report import texts

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


# Probes: associative recall, the needle, and loss by position in the context

_RECALL = {"recall_acc": "all", "recall_acc_near": "near", "recall_acc_far": "far"}
_POSITIONS = {f"loss_part{i}": f"{i}/8" for i in range(1, 9)} | {"loss_beyond": "beyond"}
_SCORINGS = {"": "one-shot", "_served": "served"}

_NEEDLES: dict[str, dict[str, tuple[str, str | None]]] = {
    "loss": {
        "loss": ("one-shot", ""),
        "loss_served": ("served", "_served"),
        "loss_change": ("served minus one-shot", None),
    },
    "accuracy": {"accuracy": ("one-shot", None), "accuracy_served": ("served", None)},
}
"""Table -> number of a line -> way of scoring, and the ending of the gain that marks a cell."""

NeedleLine = Mapping[str, Any]
"""What one trial recorded of one length and depth; see `kvlab.evaluate.probes.needle_lines`."""

_FOUND_GAIN, _FOUND_ERRORS = 1.0, 2.0
"""A found needle lowers the loss at every seed by more nats per token than the first, beyond the
second in standard errors over rows. Less, such as of a token that is likelier because it occurred,
is no recall, however small its error."""


def report_probes(study: Study) -> doc.Section | None:
    """Report what average loss hides."""
    contents: list[doc.Content] = []
    if "recall_acc" in study.measured_metrics:
        pairs = {int(row.measurements.get("recall_pairs", 0)) for row in study.done_rows} - {0}
        note = texts.write("recall", pairs=sorted(pairs))
        table = _scored_table(study, "recall", "Values recalled (%), mean over seeds.", _RECALL)
        contents += [doc.Heading("Associative recall"), note, table]
    contents += _report_needles(study)
    if "loss_part1" in study.measured_metrics:
        note = texts.write("positions", has_more="loss_beyond" in study.measured_metrics)
        caption = "Nats a token by part of the context, mean over seeds."
        table = _scored_table(study, "positions", caption, _POSITIONS)
        contents += [doc.Heading("Loss by position"), note, *_draw_positions(study), table]
    return doc.Section("Probes", tuple(contents)) if contents else None


def _scored_table(study: Study, name: str, caption: str, heads: Mapping[str, str]) -> doc.Table:
    """Tabulate metrics of every cell, one-shot and served."""
    rows = []
    for levels, (ending, scoring) in product(study.cells, _SCORINGS.items()):
        entries = [
            (
                cols.mean_column(head, fmt.display_unit(metric)),
                cols.mean_cell(study, levels, f"{metric}{ending}"),
            )
            for metric, head in heads.items()
            if metric in study.measured_metrics
        ]
        if any(entry is not doc.EMPTY_CELL for _, entry in entries):
            named: doc.Entries = (("cell", study.label(levels)), ("scored", scoring), *entries)
            rows.append((named, study.cell_key(levels)))
    if len(study.seeds) > 1:
        caption += f" {format_count(len(study.seeds), 'seed')}."
        caption += f" {fmt.PLUS_MINUS} is the standard deviation."
    return doc.make_table(name, caption, rows)


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
    ends = "; ".join(
        f"{line.name} goes from {fmt.format_metric('loss', line.points[0].y)}"
        f" to {fmt.format_metric('loss', line.points[-1].y)}"
        for line in lines
    )
    plot = doc.Plot(doc.Axis("eighth of the context"), doc.Axis("loss (nats/token)"), tuple(lines))
    yield doc.Figure("positions", caption, f"{caption} {ends}.", plot)


# Needles


def _report_needles(study: Study) -> list[doc.Content]:
    """Report the loss of the needle's answer and the share of its tokens on top."""
    lines = [line for row in study.done_rows for line in row.record.get("needle", ())]
    if not lines:
        return []
    places = [found for levels in study.cells for found in _places(study, levels).values()]
    found = [place for place in places if _is_found(place, "")]
    is_served = any("gain_served" in line for line in lines)
    shown = partial(fmt.format_fixed, digits=2)
    fields = {
        "rows": [f"{count:,}" for count in sorted({line["rows"] for line in lines})],
        "chance": fmt.format_ends((line["chance"] for line in lines), shown),
        "n_found": len(found),
        "n": len(places),
        "gain": fmt.format_fixed(max(line["gain"] for line in lines), 3),
        "n_lost": sum(not _is_found(one, "_served") for one in found) if is_served else None,
    }
    note = texts.write("needles", **fields)
    depths = sorted({line["depth"] for line in lines})
    over = "standard deviation over seeds" if len(study.seeds) > 1 else "standard error over rows"
    caption = texts.fill(
        "needle table", sign=fmt.PLUS_MINUS, over=over, gain=_FOUND_GAIN, errors=_FOUND_ERRORS
    )
    losses = doc.make_table("needle", caption, _needle_rows(study, depths, "loss", "nats/token"))
    caption = "Answer tokens of the needle that are the likeliest (%);"
    caption += f" mean {fmt.PLUS_MINUS} {over}."
    rows = _needle_rows(study, depths, "accuracy", "%")
    accuracies = doc.make_table("needle-accuracy", caption, rows)
    return [doc.Heading("Needle in a haystack"), note, losses, accuracies]


def _places(study: Study, levels: Levels) -> dict[tuple[int, float], list[NeedleLine]]:
    """Return a cell's lines, one a seed, by length and depth."""
    places: dict[tuple[int, float], list[NeedleLine]] = {}
    for row in study.cells[levels].values():
        for line in row.record.get("needle", ()) if row.is_done else ():
            places.setdefault((line["length"], line["depth"]), []).append(line)
    return places


def _is_found(lines: list[NeedleLine], ending: str) -> bool:
    """Return whether the answer is at least e times as likely as without the needle."""
    name = f"gain{ending}"
    return all(
        name in line and line[name] > _FOUND_GAIN + _FOUND_ERRORS * line.get(f"{name}_stderr", 0.0)
        for line in lines
    )


def _needle_rows(
    study: Study, depths: list[float], metric: str, unit: str
) -> Iterator[doc.KeyedRow]:
    """Yield a row for each cell, length and way of scoring: of the loss, or of the accuracy."""
    for levels in study.cells:
        places = _places(study, levels)
        lengths = sorted({length for length, _ in places})
        for length, (name, (scoring, mark)) in product(lengths, _NEEDLES[metric].items()):
            by_depth = {depth: places.get((length, depth), []) for depth in depths}
            cells = {depth: _needle_cell(by_depth[depth], name, mark) for depth in depths}
            if all(cell is doc.EMPTY_CELL for cell in cells.values()):
                continue
            entries: list[tuple[doc.Column | str, doc.Value]] = []
            entries += [("cell", study.label(levels)), ("length", length), ("scored", scoring)]
            if metric == "loss":
                lines = next(filter(None, by_depth.values()))  # the same at every depth
                absent = _needle_cell(lines, name.replace("loss", "loss_absent"))
                hint = "loss of the same answer without a needle"
                entries.append((_needle_column("absent", unit, hint), absent))
            for depth, cell in cells.items():
                title = f"depth {fmt.format_percent(depth, 0)}"
                entries.append((_needle_column(title, unit), cell))
            yield entries, study.cell_key(levels)


def _needle_column(title: str, unit: str, hint: str = "") -> doc.Column:
    return doc.Column(title, True, hint, (f"{title} ({unit})", f"{title} error ({unit})"))


def _needle_cell(lines: list[NeedleLine], name: str, ending: str | None = None) -> doc.Cell:
    """Return the mean of ``name`` over seeds, with its spread or at one seed its error.

    Args:
        lines: One a seed.
        name: Of a number in them.
        ending: Mark the cell if the needle is found one-shot, by whether it is found in the way of
            scoring with this ending.
    """
    values = [line[name] for line in lines if name in line]
    if not values:
        return doc.EMPTY_CELL
    scale, digits = (100.0, 1) if name.startswith("accuracy") else (1.0, 3)
    mean, spread = cols.mean_and_spread(values)
    if len(values) == 1:
        spread = lines[0].get(f"{name}_stderr")
    show = fmt.format_signed if name.endswith("change") else fmt.format_fixed
    text = show(scale * mean, digits)
    if spread is not None:
        text += f" {fmt.PLUS_MINUS} {fmt.format_fixed(scale * spread, digits)}"
    tone: doc.Tone = ""
    if ending is not None and _is_found(lines, ""):
        is_found = _is_found(lines, ending)
        tone, text = ("good", text) if is_found else ("bad", f"{text}, lost")
    error = None if spread is None else scale * spread
    return doc.Cell(text, scale * mean, tone, csv=(scale * mean, error))
