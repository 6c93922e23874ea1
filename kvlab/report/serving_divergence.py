"""Divergence: how serving changes the distribution of the next token; part of the serving gap."""

import math

from kvlab.analysis.statistics import CONFIDENCE, sum_squares, t_quantile
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report.table_columns import mean_cell, mean_column, range_column
from kvlab.store.metrics import KL_ROUNDING, METRICS

KL, TOP_CHANGED = "serving_kl", "serving_top_changed"

Interval = tuple[float, float | None, float | None]
"""A cell's mean, and the ends of its simultaneous interval if it has one."""


def serving_divergence(study: Study) -> list[doc.Content]:
    """Report KL divergence and changed top tokens of every cell, with intervals."""
    means = study.means(KL)
    beyond = [levels for levels, mean in means.items() if mean]
    if not beyond:
        return []
    found = {levels: _kl_interval(study, levels, len(beyond)) for levels in beyond}
    found = dict(sorted(found.items(), key=lambda item: item[1][0]))
    position_tables = (_position_table(study, list(found), m) for m in (KL, TOP_CHANGED))
    folded: tuple[doc.Content, ...] = (
        doc.paragraph(_method(study, len(means) - len(beyond))),
        _figure(study, found),
        _table(study, found),
        *(table for table in position_tables if table),
    )
    return [_summarize(study, found), doc.Fold("Divergence from one-shot predictions", folded)]


def _summarize(study: Study, found: dict[Levels, Interval]) -> doc.Paragraph:
    """Say how often serving changes the likeliest token where the divergence is largest."""
    worst = list(found)[-1]
    share = study.mean(worst, TOP_CHANGED)
    text = f": KL(one-shot || served) is {fmt.format_metric(KL, found[worst][0])} nats/token"
    if share is not None:
        shown = fmt.format_metric(TOP_CHANGED, share)
        text += f", and {shown}% of the likeliest tokens differ"
    name = doc.Strong(study.label(worst))
    return doc.paragraph("Serving changes predictions most at ", name, f"{text}.")


def _method(study: Study, n_rounding: int) -> str:
    text = (
        "Two mean losses can agree while predictions differ. So the distributions of the next token"
        " are compared at every position of the served text: by KL(one-shot || served), and by the"
        " share of positions whose likeliest token differs."
    )
    if n_rounding:
        limit = fmt.format_spread(KL_ROUNDING, 1)
        text += f" {format_count(n_rounding, 'cell')} with a divergence below {limit} (rounding)"
        text += f" {'is' if n_rounding == 1 else 'are'} left out."
    over = "over seeds" if len(study.seeds) > 1 else "over windows of text, of these weights alone"
    return (
        f"{text} Intervals are {over}, and those of divergences are taken in logarithms. They hold"
        " for all cells of the table at once (Bonferroni)."
    )


def _kl_interval(study: Study, levels: Levels, n_cells: int) -> Interval:
    """Return the geometric mean over seeds; at one seed the mean, with the error over windows."""
    values = list(study.values(levels, KL).values())
    if min(values) <= 0:
        return math.fsum(values) / len(values), None, None
    logs = [math.log(value) for value in values]
    center, reach = _mean_and_reach(study, levels, logs, KL, n_cells)
    if len(values) == 1:  # the error is that of the divergence itself
        reach /= values[0]
    if not reach:
        return math.exp(center), None, None
    return math.exp(center), math.exp(center - reach), math.exp(center + reach)


def _share_interval(study: Study, levels: Levels, n_cells: int) -> Interval:
    values = list(study.values(levels, TOP_CHANGED).values())
    center, reach = _mean_and_reach(study, levels, values, TOP_CHANGED, n_cells)
    if not reach:
        return center, None, None
    return center, max(0.0, center - reach), min(1.0, center + reach)


def _mean_and_reach(
    study: Study, levels: Levels, values: list[float], metric: str, n_cells: int
) -> tuple[float, float]:
    """Return the mean and the half width of its interval: over windows of text at one seed."""
    count, center = len(values), math.fsum(values) / len(values)
    if count > 1:
        error, df = math.sqrt(sum_squares(values, center) / (count - 1) / count), count - 1
    else:
        error = study.mean(levels, f"{metric}_stderr") or 0.0
        windows = (study.mean(levels, "served_tokens") or 0) // (study.block_size(levels) or 1)
        df = max(1, int(windows) - 1)
    tail = (1 - CONFIDENCE) / 2 / n_cells
    return center, error * t_quantile(1 - tail, df) if error else 0.0


def _table(study: Study, found: dict[Levels, Interval]) -> doc.Table:
    hint = "simultaneous over the cells of the table"
    columns = (
        doc.Column("cell"),
        doc.Column("n", True),
        doc.Column("KL (nats/token)", True, "KL(one-shot || served)"),
        range_column("KL 95% CI", "nats/token", hint),
        doc.Column("top changed (%)", True, "positions whose likeliest token differs"),
        range_column("top changed 95% CI", "%", hint),
    )
    rows = []
    for levels, kl in found.items():
        count, cells = len(study.values(levels, KL)), [doc.cell(study.label(levels))]
        cells.append(doc.cell(str(count), count))
        share = _share_interval(study, levels, len(found))
        for metric, (value, *ends) in ((KL, kl), (TOP_CHANGED, share)):
            shown = fmt.in_display_unit(metric, value)
            cells.append(doc.Cell(fmt.format_metric(metric, value), shown))
            known = [end for end in ends if end is not None]
            text = " to ".join(fmt.format_metric(metric, end) for end in known)
            csv = tuple(fmt.in_display_unit(metric, end) for end in known)
            cells.append(doc.Cell(text, csv[0], csv=csv) if known else doc.EMPTY_CELL)
        rows.append(doc.Row(tuple(cells), study.cell_key(levels)))
    caption = "What serving changes in the distribution of the next token, the least first."
    return doc.Table("serving-divergence", caption, columns, tuple(rows))


def _figure(study: Study, found: dict[Levels, Interval]) -> doc.Figure:
    points = []
    for index, (levels, (value, low, high)) in enumerate(found.items()):
        ends = (low, high) if low is not None and high is not None else None
        tip = (study.label(levels), f"KL {fmt.format_metric(KL, value)} nats/token")
        points.append(doc.Point(value, index, tip, study.cell_key(levels), x_range=ends))
    plot = doc.Plot(
        doc.Axis("KL(one-shot || served), nats/token", "log"),
        doc.Axis("", "names", tuple(map(study.label, found))),
        (doc.Points("", tuple(points), "c0", "diamond"),),
    )
    bars = ", with simultaneous 95% intervals" if any(p.x_range for p in points) else ""
    caption = f"Divergence of the served predictions from the one-shot ones{bars}."
    described = "; ".join(": ".join(point.tip) for point in points)
    return doc.Figure("serving-divergence", caption, f"{caption} {described}.", plot)


def _position_table(study: Study, cells: list[Levels], metric: str) -> doc.Table | None:
    rows = []
    for levels in cells:
        entries = [mean_cell(study, levels, f"{metric}_part{i}") for i in range(1, 9)]
        if any(entry is not doc.EMPTY_CELL for entry in entries):
            rows.append(doc.Row((doc.cell(study.label(levels)), *entries), study.cell_key(levels)))
    if not rows:
        return None
    title, unit, stem = "KL divergence", "nats/token", "kl"
    if metric == TOP_CHANGED:
        title, unit, stem = METRICS[TOP_CHANGED].title.capitalize(), "%", "top"
    spread = ""
    if len(study.seeds) > 1:
        spread = f", mean {fmt.PLUS_MINUS} standard deviation over seeds"
    caption = f"{title} ({unit}) by eighth of the context, the earliest first{spread}."
    columns = (doc.Column("cell"), *(mean_column(f"{i}/8", unit) for i in range(1, 9)))
    return doc.Table(f"serving-{stem}-positions", caption, columns, tuple(rows))
