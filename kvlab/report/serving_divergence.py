"""Divergence: how serving changes the distribution of the next token; part of the serving gap."""

import math
from dataclasses import dataclass

from kvlab.analysis.statistics import CONFIDENCE, sum_squares, t_quantile
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Figure,
    Fold,
    Row,
    Span,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.figures.plot import Axis, Plot, Point, Points
from kvlab.report.formatting import PLUS_MINUS, format_metric, format_spread, in_display_unit
from kvlab.report.table_columns import mean_cell, mean_column, range_column
from kvlab.store.metrics import KL_ROUNDING, METRICS

KL, TOP_CHANGED = "serving_kl", "serving_top_changed"


@dataclass(frozen=True)
class _Interval:
    """A cell's mean, and the ends of its simultaneous interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None


def serving_divergence(study: Study) -> list[Content]:
    """Report KL divergence and changed top tokens of every cell, with intervals."""
    means = study.means(KL)
    if not means:
        return []
    rounding = [levels for levels in means if not means[levels]]
    beyond = [levels for levels in means if means[levels]]
    intervals = {levels: _kl_interval(study, levels, len(beyond)) for levels in beyond}
    intervals = dict(sorted(intervals.items(), key=lambda item: item[1].value))
    position_tables = (_position_table(study, list(intervals), m) for m in (KL, TOP_CHANGED))
    if not intervals:
        return []
    folded = (
        paragraph(_method(study, len(rounding))),
        *_figure(study, intervals),
        _table(study, intervals),
        *(table for table in position_tables if table),
    )
    return [
        paragraph(*_summarize(study, intervals)),
        Fold("Divergence from one-shot predictions", folded),
    ]


def _summarize(study: Study, intervals: dict[Levels, _Interval]) -> list[Span]:
    """Say how often serving changes the likeliest token where the divergence is largest."""
    worst = list(intervals)[-1]
    share = study.mean(worst, TOP_CHANGED)
    spans: list[Span] = [
        "Serving changes predictions most at ",
        Strong(study.label(worst)),
        f": KL(one-shot || served) is {format_metric(KL, intervals[worst].value)} nats/token",
    ]
    if share is not None:
        spans.append(f", and {format_metric(TOP_CHANGED, share)}% of the likeliest tokens differ")
    return [*spans, "."]


def _method(study: Study, n_rounding: int) -> str:
    text = (
        "Two mean losses can agree while predictions differ. So the distributions of the next token"
        " are compared at every position of the served text: by KL(one-shot || served), and by the"
        " share of positions whose likeliest token differs."
    )
    if n_rounding:
        limit = format_spread(KL_ROUNDING, 1)
        text += f" {format_count(n_rounding, 'cell')} with a divergence below {limit} (rounding)"
        text += f" {'is' if n_rounding == 1 else 'are'} left out."
    source = (
        "over seeds" if len(study.seeds) > 1 else "over windows of text, of these weights alone"
    )
    return text + (
        f" Intervals are {source}, and those of divergences are taken in logarithms. They hold for"
        " all cells of the table at once (Bonferroni)."
    )


def _kl_interval(study: Study, levels: Levels, n_cells: int) -> _Interval:
    """Return the geometric mean over seeds; at one seed the mean, with the error over windows."""
    values = list(study.values(levels, KL).values())
    if min(values) <= 0:
        return _Interval(math.fsum(values) / len(values))
    logs = [math.log(value) for value in values]
    center, error, df = _mean_and_error(study, levels, logs, KL)
    if len(values) == 1:
        error /= values[0]
    half_width = _half_width(error, df, n_cells)
    if not half_width:
        return _Interval(math.exp(center))
    return _Interval(*(math.exp(center + sign * half_width) for sign in (0, -1, 1)))


def _share_interval(study: Study, levels: Levels, n_cells: int) -> _Interval:
    values = list(study.values(levels, TOP_CHANGED).values())
    center, error, df = _mean_and_error(study, levels, values, TOP_CHANGED)
    half_width = _half_width(error, df, n_cells)
    if not half_width:
        return _Interval(center)
    return _Interval(center, max(0.0, center - half_width), min(1.0, center + half_width))


def _mean_and_error(
    study: Study, levels: Levels, values: list[float], metric: str
) -> tuple[float, float, int]:
    """Return mean, standard error and its degrees of freedom: over windows at one seed."""
    count, center = len(values), math.fsum(values) / len(values)
    if count > 1:
        variance = sum_squares(values, center) / (count - 1)
        return center, math.sqrt(variance / count), count - 1
    error = study.mean(levels, f"{metric}_stderr") or 0.0
    windows = (study.mean(levels, "served_tokens") or 0) // (study.block_size(levels) or 1)
    return center, error, max(1, int(windows) - 1)


def _half_width(error: float, df: int, n_cells: int) -> float:
    tail = (1 - CONFIDENCE) / 2 / max(1, n_cells)
    return error * t_quantile(1 - tail, df) if error else 0.0


def _table(study: Study, intervals: dict[Levels, _Interval]) -> Table:
    hint = "simultaneous over the cells of the table"
    columns = (
        Column("cell"),
        Column("n", True),
        Column("KL (nats/token)", True, "KL(one-shot || served)"),
        range_column("KL 95% CI", "nats/token", hint),
        Column("top changed (%)", True, "positions whose likeliest token differs"),
        range_column("top changed 95% CI", "%", hint),
    )
    rows = []
    for levels in intervals:
        values = study.values(levels, KL)
        share = _share_interval(study, levels, len(intervals))
        kl = intervals[levels]
        entries = (
            cell(study.label(levels)),
            cell(str(len(values)), len(values)),
            Cell(format_metric(KL, kl.value), kl.value),
            _interval_cell(KL, kl),
            Cell(format_metric(TOP_CHANGED, share.value), 100 * share.value),
            _interval_cell(TOP_CHANGED, share),
        )
        rows.append(Row(entries, study.cell_key(levels)))
    caption = "What serving changes in the distribution of the next token, the least first."
    return Table("serving-divergence", caption, columns, tuple(rows))


def _interval_cell(metric: str, interval: _Interval) -> Cell:
    if interval.low is None or interval.high is None:
        return EMPTY_CELL
    ends = interval.low, interval.high
    text = " to ".join(format_metric(metric, end) for end in ends)
    return Cell(
        text, in_display_unit(metric, ends[0]), csv=tuple(in_display_unit(metric, e) for e in ends)
    )


def _figure(study: Study, intervals: dict[Levels, _Interval]) -> list[Content]:
    names = tuple(study.label(levels) for levels in intervals)
    points = []
    for index, (levels, kl) in enumerate(intervals.items()):
        ends = (kl.low, kl.high) if kl.low is not None and kl.high is not None else None
        tip = (names[index], f"KL {format_metric(KL, kl.value)} nats/token")
        points.append(Point(kl.value, index, tip, study.cell_key(levels), x_range=ends))
    plot = Plot(
        Axis("KL(one-shot || served), nats/token", "log"),
        Axis("", "names", names),
        (Points("", tuple(points), "c0", "diamond"),),
    )
    has_bars = any(point.x_range for point in points)
    bars = ", with simultaneous 95% intervals" if has_bars else ""
    caption = f"Divergence of the served predictions from the one-shot ones{bars}."
    described = "; ".join(point.tip[0] + ": " + point.tip[1] for point in points)
    return [Figure("serving-divergence", caption, f"{caption} {described}.", plot)]


def _position_table(study: Study, cells: list[Levels], metric: str) -> Table | None:
    parts = [f"{metric}_part{i}" for i in range(1, 9)]
    rows = []
    for levels in cells:
        entries = [mean_cell(study, levels, part) for part in parts]
        if any(entry is not EMPTY_CELL for entry in entries):
            rows.append(Row((cell(study.label(levels)), *entries), study.cell_key(levels)))
    if not rows:
        return None
    is_kl = metric == KL
    unit, stem = ("nats/token", "kl") if is_kl else ("%", "top")
    title = "KL divergence" if is_kl else METRICS[TOP_CHANGED].title.capitalize()
    spread = f", mean {PLUS_MINUS} standard deviation over seeds" if len(study.seeds) > 1 else ""
    caption = f"{title} ({unit}) by eighth of the context, the earliest first{spread}."
    columns = (Column("cell"), *(mean_column(f"{i}/8", unit) for i in range(1, 9)))
    return Table(f"serving-{stem}-positions", caption, columns, tuple(rows))
