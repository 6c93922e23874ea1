"""How effects change with the size of the model: a table, a figure, and predictions."""

import math
from collections.abc import Iterator

from kvlab.analysis.statistics import estimate
from kvlab.analysis.study import Study
from kvlab.analysis.verdicts import judge_interval
from kvlab.extensions.scaling.trends import Prediction, SizeTrend, list_trends
from kvlab.humanize import format_number
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.spec.size_config import MAX_EXTRAPOLATION
from kvlab.store.metrics import METRICS

MAX_LINES = 4
"""Levels in the figure: each has points, a line and a band."""

_LINE_POINTS = 24


def report_size_trends(study: Study) -> doc.Section | None:
    """Report the trend of every level's effect over sizes, if the sweep has `size`."""
    trends = list_trends(study)
    if not any(trend.law for trend in trends):
        return None
    size = study.sweep["size"]
    by_size = sorted(size["parameters"].items(), key=lambda item: item[1])
    sizes = ", ".join(f"{level} {format_number(count)}" for level, count in by_size)
    caption = f"Trends of the {METRICS[study.primary_metric].title} over sizes."
    rows = [(_trend_entries(study, one), _trend_key(study, one), not one.law) for one in trends]
    contents: list[doc.Content] = [
        texts.write("sizes", factor=size["factor"], sizes=sizes),
        doc.make_table("size-trends", caption, rows),
        _figure(study, trends),
        doc.Fold("How trends are estimated", (texts.write("size trends"),)),
    ]
    predictions = [
        (_prediction_entries(study, trend, one), _trend_key(study, trend))
        for trend in trends
        for one in _list_predictions(study, trend)
    ]
    if predictions:
        n_seeds = max(len(trend.seeds) for trend in trends)
        note = texts.write("size predictions", n_seeds=n_seeds, most=MAX_EXTRAPOLATION)
        caption = "Predicted differences at other sizes."
        table = doc.make_table("size-predictions", caption, predictions)
        contents.append(doc.Fold("Predictions", (note, table)))
    return doc.Section("How effects change with size", tuple(contents))


def _trend_key(study: Study, trend: SizeTrend) -> str:
    return study.change_key(((trend.factor, trend.level),))


def _trend_entries(study: Study, trend: SizeTrend) -> doc.Entries:
    metric, unit = study.primary_metric, fmt.difference_unit(study.primary_metric)
    law, slope, miss, empty = trend.law, trend.slope, trend.miss, doc.EMPTY_CELL
    first = last = change = interval = corrected = own = off = off_ends = empty
    sizes: doc.Value = empty
    seeds: doc.Value = empty
    if law is not None and slope is not None:
        sizes, seeds = len(trend.sizes), len(trend.seeds)
        first, last = (
            cols.difference_cell(metric, math.fsum(row[end] for row in law.differences) / law.seeds)
            for end in (0, -1)
        )
        change = cols.difference_cell(metric, slope.value)
        if trend.has_interval:
            interval = cols.range_cell(metric, trend.low, trend.high)
            corrected = cols.number_cell(trend.corrected_p, fmt.format_p_value)
            own = cols.number_cell(slope.p, fmt.format_p_value)
    if miss is not None:
        off = cols.difference_cell(metric, miss.value)
        off_ends = cols.range_cell(metric, miss.low, miss.high) if miss.kind == "tested" else empty
    yield "factor", trend.factor
    yield "level", trend.level
    yield "sizes", sizes
    yield "seeds", seeds, "seeds that have all of these sizes"
    yield f"at the smallest ({unit})", first, "mean difference from the baseline level"
    yield f"at the largest ({unit})", last, "mean difference from the baseline level"
    yield f"per tenfold size ({unit})", change, "change of the difference"
    confidence = fmt.format_confidence(study.decide.alpha)
    hint = f"simultaneous {confidence}, of the change per tenfold"
    yield cols.range_column("interval", unit, hint), interval
    is_claimed = trend.verdict in ("rises with size", "falls with size")
    yield "verdict", doc.cell(trend.verdict, tone="" if is_claimed else "muted"), "of the trend"
    yield "p (corrected)", corrected, "of the slope, for all levels of this table"
    yield "own p", own, "of the slope's own t-test, uncorrected"
    yield f"miss at the largest ({unit})", off, "the line through the other sizes"
    yield cols.range_column("of the miss", unit, "95% interval over seeds"), off_ends


def _list_predictions(study: Study, trend: SizeTrend) -> list[Prediction]:
    """Return the predictions that say something: above zero, below it, or within the margin.

    They are at the sizes that the sweep names, or at the limit if a level was trained at smaller
    ones only.
    """
    law = trend.law
    if law is None or not trend.has_interval:
        return []
    limit = MAX_EXTRAPOLATION * law.parameters[-1]
    named = tuple(float(target) for target in study.sweep["size"]["predict"])
    sizes = tuple(target for target in named if target <= limit) or (limit,)
    better, margin = METRICS[study.primary_metric].better, study.decide.margin
    return [
        one
        for one in map(law.predict, sizes)
        if judge_interval(one.low, one.high, better, margin) not in ("undecided", "within noise")
    ]


def _prediction_entries(study: Study, trend: SizeTrend, one: Prediction) -> doc.Entries:
    assert trend.law is not None, "only laws predict"
    metric, unit = study.primary_metric, fmt.difference_unit(study.primary_metric)
    line, beyond = trend.law.line(one.parameters), one.parameters / trend.law.parameters[-1]
    yield "factor", trend.factor
    yield "level", trend.level
    hint = "without embeddings, with the output head"
    yield "parameters", doc.cell(format_number(one.parameters), one.parameters), hint
    yield "beyond", doc.cell(fmt.format_ratio(beyond), beyond), "in multiples of the largest size"
    yield f"predicted difference ({unit})", cols.difference_cell(metric, one.value)
    for title, hint, ends in (
        ("95% prediction", "of the mean difference over as many new seeds", (one.low, one.high)),
        ("95% of the line", "of the mean over many seeds", (line.low, line.high)),
    ):
        yield cols.range_column(title, unit, hint), cols.range_cell(metric, *ends)


def _figure(study: Study, trends: list[SizeTrend]) -> doc.Figure:
    """Plot the differences by size, their line, and the band of predictions."""
    metric = study.primary_metric
    fitted = sorted((trend for trend in trends if trend.law), key=lambda trend: trend.corrected_p)
    layers: list[doc.Points | doc.Line] = []
    for number, trend in enumerate(fitted[:MAX_LINES]):
        layers += _draw_trend(study, trend, doc.SERIES[number])
    axis = doc.Axis("parameters without embeddings, with the head (logarithmic)", "log")
    y_axis = doc.Axis(f"difference in {fmt.short_title(metric)} ({fmt.difference_unit(metric)})")
    caption = texts.fill("caption of size trends", n=len(fitted), most=MAX_LINES)
    changes = "; ".join(
        f"{trend.factor}={trend.level}: {fmt.difference_with_unit(metric, trend.value)}"
        f" per tenfold size, {trend.verdict}"
        for trend in fitted
    )
    plot = doc.Plot(axis, y_axis, tuple(layers))
    return doc.Figure("size-trends", caption, f"{caption} {changes}.", plot)


def _draw_trend(study: Study, trend: SizeTrend, role: doc.Role) -> Iterator[doc.Points | doc.Line]:
    metric, law, key = study.primary_metric, trend.law, _trend_key(study, trend)
    assert law is not None, "only fitted levels are drawn"
    name = f"{trend.factor}={trend.level}"
    points = []
    for index, (level, count) in enumerate(zip(trend.sizes, law.parameters, strict=True)):
        one = estimate([row[index] for row in law.differences])
        place = f"{level}: {format_number(count)} parameters"
        tip = (name, place, fmt.difference_with_unit(metric, one.value))
        bar = (one.low, one.high) if one.kind == "tested" else None
        points.append(doc.Point(count, one.value, tip, key, y_range=bar))
    yield doc.Points(name, tuple(points), role)
    first = law.parameters[0]
    last = max([*(one.parameters for one in _list_predictions(study, trend)), law.parameters[-1]])
    ratio = (last / first) ** (1 / (_LINE_POINTS - 1))
    sizes = [*(first * ratio**n for n in range(_LINE_POINTS - 1)), last]
    if not trend.has_interval:
        means = [(size, math.fsum(law.by_seed(size)) / law.seeds) for size in sizes]
        yield doc.Line("", tuple(doc.Point(x, y, (name,), key) for x, y in means), role)
        return
    middle, low, high = [], [], []
    for size in sizes:
        found = law.predict(size)
        difference = fmt.difference_with_unit(metric, found.value)
        interval = fmt.format_interval(metric, found.low, found.high)
        place = f"{format_number(size)} parameters, {difference}"
        tip = (name, place, f"95% prediction {interval}")
        middle.append(doc.Point(size, found.value, tip, key))
        low.append(doc.Point(size, found.low, (name,), key))
        high.append(doc.Point(size, found.high, (name,), key))
    yield doc.Line("", tuple(middle), role)
    yield doc.Line("", tuple(low), role, "dashed")
    yield doc.Line("", tuple(high), role, "dashed")
