"""The table of cells, and their curves."""

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.pareto_front import find_front
from kvlab.store.metrics import METRICS

MAX_OPEN_ROWS = 24
"""Rows of a table of cells that is not folded."""


def report_cells(study: Study) -> doc.Section | None:
    """List every cell with its KV bytes, its loss and its difference from its reference."""
    if not study.done_rows:
        return None
    caption = f"{format_count(len(study.cells), 'cell')}; the baseline is the first."
    measured = study.means(study.primary_metric)
    rows = [
        (_cell_entries(study, levels), study.cell_key(levels), levels not in measured)
        for levels in study.cells
    ]
    table: doc.Content = doc.make_table("cells", caption, rows)
    if len(rows) > MAX_OPEN_ROWS:
        table = doc.Fold(format_count(len(rows), "cell"), (table,))
    intervals = texts.write("intervals of cells", study=study, scope=cols.interval_scope(study))
    fold = doc.Fold("What the intervals hold for", (intervals,))
    return doc.Section("Cells", (texts.write("cells", study=study), table, fold))


def _cell_entries(study: Study, levels: Levels) -> doc.Entries:
    metric = study.primary_metric
    for factor, level, base in zip(study.factors, levels, study.baseline, strict=True):
        yield doc.Column(factor), doc.cell(level, tone="muted" if level == base else "")
    yield "n", len(study.values(levels, metric)), "trials measured"
    if study.diverged_cells:
        hint = "trials that diverged, of all; such a cell is never the best"
        count, total = study.diverged_cells.get(levels, 0), len(study.cells[levels])
        text, csv = f"{count} of {total}" if count else "0", (count, total)
        diverged = doc.Cell(text, count, "bad" if count else "muted", csv=csv)
        yield doc.Column("diverged", True, hint, ("diverged", "trials")), diverged
    yield from cols.cache_entries(study, levels)
    column = cols.mean_column(cols.metric_title(metric), hint=METRICS[metric].title)
    yield column, cols.mean_cell(study, levels, metric)
    if (of_zero := cols.text_metric(study, 0.0)) is not None:
        is_bits, loss = of_zero[0] == "bits/byte", study.mean(levels, metric)
        hint = "the loss divided by ln 2: a token is a byte" if is_bits else "exp of the loss"
        found = None if loss is None else cols.text_metric(study, loss)
        number = cols.number_cell(found and found[1], lambda n: fmt.format_significant(n, 4))
        yield doc.Column(of_zero[0], True, hint), number
    one_shot = study.one_shot_metric
    if one_shot != metric:
        unit, hint = fmt.display_unit(one_shot), METRICS[one_shot].title
        column = cols.mean_column(fmt.short_title(one_shot), unit, hint)
        yield cols.csv_only(column), cols.mean_cell(study, levels, one_shot)
    yield from cols.reference_entries(study, levels)


# Curves


def report_loss_curves(study: Study) -> doc.Section | None:
    """Plot validation loss during training, of the baseline and the cells of most interest.

    These are the cells that differ from it in one factor, and those on the front.
    """
    front = [point.levels for point in find_front(study) if point.is_on_front]
    n_changed = study.n_changed_factors
    simple = sorted((c for c in study.cells if n_changed(c) <= 1), key=n_changed)
    lines: list[doc.Line] = []
    drawn: set[str] = set()
    for levels in dict.fromkeys([*simple, *front]):
        trainings = {row.training for row in study.cells[levels].values() if row.curve}
        if trainings and not trainings & drawn and len(lines) < len(doc.SERIES):
            drawn |= trainings
            curve = _mean_curve(study, levels)
            lines.append(doc.draw_series(len(lines), study.label(levels), curve))
    if not any(len(line.points) > 1 for line in lines):
        return None  # each training was evaluated at its end alone
    n_curved = sum(any(row.curve for row in by_seed.values()) for by_seed in study.cells.values())
    pairs = {
        (-(-during // block) * block, int(final))  # in whole windows, as it is scored
        for row in study.done_rows
        if (during := row.record["experiment"].get("training", {}).get("evaluate_tokens"))
        and (final := row.measurements.get("loss_tokens"))
        and (block := row.record["experiment"].get("model", {}).get("block_size", 1))
    }
    other = sorted(pairs) if any(during != final for during, final in pairs) else []
    note = texts.write("loss curves", n=len(lines), n_curved=n_curved, other=other)
    caption = "Validation loss against training tokens."
    axes = doc.Axis("training tokens (millions)"), doc.Axis("validation loss (nats/token)")
    alt, plot = f"{caption} {doc.describe_ends(lines)}", doc.Plot(*axes, tuple(lines))
    return doc.Section("Loss curves", (note, doc.Figure("curves", caption, alt, plot)))


def _mean_curve(study: Study, levels: Levels) -> tuple[doc.Point, ...]:
    """Return the mean over seeds, at the steps that all seeds have."""
    rows = [row for row in study.cells[levels].values() if row.curve]
    shared = set.intersection(*({step for step, _, _ in row.curve} for row in rows))
    tokens = {step: count for row in rows for step, count, _ in row.curve if step in shared}
    losses = [{step: loss for step, _, loss in row.curve} for row in rows]
    points = []
    for step in sorted(shared):
        loss = sum(of_seed[step] for of_seed in losses) / len(rows)
        position = f"step {step:,.0f}, {tokens[step]:,.0f} tokens"
        tip = (study.label(levels), position, f"loss {fmt.format_metric('loss', loss)}")
        points.append(doc.Point(tokens[step] / 10**6, loss, tip, study.cell_key(levels)))
    return tuple(points)
