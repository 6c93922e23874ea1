"""How effects change with the size of the model: trends, predictions, and how good those are."""

import math

from kvlab.analysis.scaling import MIN_SEEDS, Prediction, SizeTrend
from kvlab.analysis.statistics import estimate
from kvlab.analysis.study import Study
from kvlab.analysis.verdicts import judge_interval
from kvlab.humanize import format_count, format_number
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Figure,
    Fold,
    Row,
    Section,
    Table,
    cell,
    paragraph,
)
from kvlab.report.figures.plot import SERIES, Axis, Line, Plot, Point, Points
from kvlab.report.formatting import (
    difference_unit,
    format_difference,
    format_p_value,
    format_ratio,
    in_display_unit,
    short_title,
)
from kvlab.report.table_columns import range_cell, range_column
from kvlab.spec.size_config import MAX_EXTRAPOLATION
from kvlab.store.metrics import METRICS

MAX_LINES = 4
"""Levels in the figure: each has points, a line and a band."""

_LINE_POINTS = 24


def report_size_trends(study: Study) -> Section | None:
    """Report the trend of every level's effect over sizes, if the sweep has `size`."""
    trends = study.size_trends
    if not any(trend.law for trend in trends):
        return None
    predicted = [trend for trend in trends if _list_predictions(study, trend)]
    contents: list[Content] = [
        paragraph(_introduce(study)),
        _trend_table(study, trends),
        _figure(study, trends),
        Fold("How trends are estimated", (paragraph(_describe_method()),)),
    ]
    if predicted:
        note = paragraph(_describe_prediction(study))
        contents.append(Fold("Predictions", (note, _prediction_table(study, predicted))))
    return Section("How effects change with size", tuple(contents))


def _introduce(study: Study) -> str:
    size = study.sweep["size"]
    by_size = sorted(size["parameters"].items(), key=lambda item: item[1])
    sizes = ", ".join(f"{level} {format_number(count)}" for level, count in by_size)
    return (
        f"How each level's difference changes with {size['factor']}: {sizes}. Parameters are"
        " counted without the embeddings of tokens and positions, and with the output head."
    )


def _describe_method() -> str:
    return (
        "At every seed the paired difference is fitted by a straight line of the logarithm of the"
        " size. The slopes are tested over seeds. For levels that change training the standard"
        " error is the larger of the level's own and the one pooled over levels. Own p is the"
        " level's own t-test. The intervals hold for all levels of the table together. The miss is"
        " the difference at the largest size minus the prediction of the line through the other"
        " sizes. If its interval does not contain zero, the differences do not follow a line."
    )


def _describe_prediction(study: Study) -> str:
    seeds = max(len(trend.seeds) for trend in study.size_trends)
    return (
        f"What {format_count(seeds, 'new seed')} at that size would show, if the line goes on: the"
        " prediction interval has the spread of the line over seeds and that of the new"
        " differences, each level for itself. The interval of the line is that of the mean over"
        f" many seeds. Nothing is predicted beyond {MAX_EXTRAPOLATION:g} times the largest size. An"
        " interval that holds zero and reaches beyond the margin says nothing, and is left out."
        " The miss above is the only check that the data offer: it is a smaller step than this one."
    )


def _is_predictable(trend: SizeTrend) -> bool:
    return trend.law is not None and trend.is_tested and len(trend.seeds) >= MIN_SEEDS


def _trend_table(study: Study, trends: list[SizeTrend]) -> Table:
    metric = study.primary_metric
    unit = difference_unit(metric)
    columns = (
        Column("factor"),
        Column("level"),
        Column("sizes", True),
        Column("seeds", True, "seeds that have all of these sizes"),
        Column(f"at the smallest ({unit})", True, "mean difference from the baseline level"),
        Column(f"at the largest ({unit})", True, "mean difference from the baseline level"),
        Column(f"per tenfold size ({unit})", True, "change of the difference"),
        range_column("interval", unit, _interval_hint(study)),
        Column("verdict"),
        Column("p (corrected)", True, "of the slope, for all levels of this table"),
        Column("own p", True, "of the slope's own t-test, uncorrected"),
        Column(f"miss at the largest ({unit})", True, "the line through the other sizes"),
        range_column("of the miss", unit, "95% interval over seeds"),
    )
    rows = tuple(_trend_row(study, trend) for trend in trends)
    caption = f"Trends of the {METRICS[metric].title} over sizes."
    return Table("size-trends", caption, columns, rows)


def _interval_hint(study: Study) -> str:
    return f"simultaneous {100 * (1 - study.decide.alpha):g}%, of the change per tenfold"


def _trend_row(study: Study, trend: SizeTrend) -> Row:
    metric, law, slope = study.primary_metric, trend.law, trend.slope
    key = study.change_key(((trend.factor, trend.level),))
    names = (cell(trend.factor), cell(trend.level))
    if law is None or slope is None:
        empty = (EMPTY_CELL,) * 4
        verdict = cell(trend.verdict, tone="muted")
        blanks = (EMPTY_CELL,) * 6
        return Row((*names, *blanks, verdict, *empty), key, tone="muted")
    count = len(law.differences)
    first, last = (math.fsum(row[end] for row in law.differences) / count for end in (0, -1))
    is_claimed = trend.verdict in ("rises with size", "falls with size")
    return Row(
        (
            *names,
            cell(str(len(trend.sizes)), len(trend.sizes)),
            cell(str(len(trend.seeds)), len(trend.seeds)),
            _difference(metric, first),
            _difference(metric, last),
            _difference(metric, slope.value),
            range_cell(metric, trend.low, trend.high) if trend.is_tested else EMPTY_CELL,
            cell(trend.verdict, tone="" if is_claimed else "muted"),
            *_p_cells(trend),
            _difference(metric, trend.miss.value) if trend.miss else EMPTY_CELL,
            range_cell(metric, trend.miss.low, trend.miss.high)
            if trend.miss and trend.miss.kind == "tested"
            else EMPTY_CELL,
        ),
        key,
    )


def _p_cells(trend: SizeTrend) -> tuple[Cell, Cell]:
    if trend.slope is None or not trend.is_tested:
        return EMPTY_CELL, EMPTY_CELL
    corrected, own = trend.corrected_p, trend.slope.p
    return Cell(format_p_value(corrected), corrected), Cell(format_p_value(own), own)


def _difference(metric: str, value: float) -> Cell:
    return Cell(format_difference(metric, value), in_display_unit(metric, value))


def _list_predictions(study: Study, trend: SizeTrend) -> list[Prediction]:
    """Return the predictions that say something: above zero, below it, or within the margin.

    They are at the sizes that the sweep names, or at the limit if a level was trained at smaller
    ones only.
    """
    if not _is_predictable(trend):
        return []
    assert trend.law is not None, "only laws predict"
    limit = MAX_EXTRAPOLATION * trend.law.parameters[-1]
    named = tuple(float(target) for target in study.sweep["size"]["predict"])
    sizes = tuple(target for target in named if target <= limit) or (limit,)
    better, margin = METRICS[study.primary_metric].better, study.decide.margin
    predictions = [trend.law.predict(size) for size in sizes]
    verdicts = [judge_interval(one.low, one.high, better, margin) for one in predictions]
    return [
        one
        for one, name in zip(predictions, verdicts, strict=True)
        if name not in ("undecided", "within noise")
    ]


def _prediction_table(study: Study, trends: list[SizeTrend]) -> Table:
    unit = difference_unit(study.primary_metric)
    columns = (
        Column("factor"),
        Column("level"),
        Column("parameters", True, "without embeddings, with the output head"),
        Column("beyond", True, "in multiples of the largest size"),
        Column(f"predicted difference ({unit})", True),
        range_column("95% prediction", unit, "of the mean difference over as many new seeds"),
        range_column("95% of the line", unit, "of the mean over many seeds"),
    )
    rows = tuple(
        _prediction_row(study, trend, predicted)
        for trend in trends
        for predicted in _list_predictions(study, trend)
    )
    return Table("size-predictions", "Predicted differences at other sizes.", columns, rows)


def _prediction_row(study: Study, trend: SizeTrend, predicted: Prediction) -> Row:
    assert trend.law is not None, "only laws predict"
    metric, target = study.primary_metric, predicted.parameters
    line = trend.law.line(target)
    beyond = target / trend.law.parameters[-1]
    return Row(
        (
            cell(trend.factor),
            cell(trend.level),
            cell(format_number(target), target),
            Cell(format_ratio(beyond), beyond),
            _difference(metric, predicted.value),
            range_cell(metric, predicted.low, predicted.high),
            range_cell(metric, line.low, line.high),
        ),
        study.change_key(((trend.factor, trend.level),)),
    )


def _figure(study: Study, trends: list[SizeTrend]) -> Figure:
    """Plot the differences by size, their line, and the band of predictions."""
    metric = study.primary_metric
    fitted = sorted((trend for trend in trends if trend.law), key=lambda trend: trend.corrected_p)
    layers: list[Points | Line] = []
    for number, trend in enumerate(fitted[:MAX_LINES]):
        layers += _draw_trend(study, trend, number)
    axis = Axis("parameters without embeddings, with the head (logarithmic)", "log")
    unit = difference_unit(metric)
    plot = Plot(axis, Axis(f"difference in {short_title(metric)} ({unit})"), tuple(layers))
    caption = (
        "Difference of each level from its factor's baseline level against the size of the model,"
        " with 95% intervals over seeds and 95% prediction intervals (dashed)."
    )
    if len(fitted) > MAX_LINES:
        caption += f" Of {len(fitted)} levels, those with the clearest trends."
    changes = "; ".join(
        f"{trend.factor}={trend.level}: {format_difference(metric, trend.slope.value)} {unit} per"
        f" tenfold size, {trend.verdict}"
        for trend in fitted
        if trend.slope is not None
    )
    return Figure("size-trends", caption, f"{caption} {changes}.", plot)


def _draw_trend(study: Study, trend: SizeTrend, number: int) -> list[Points | Line]:
    metric, law = study.primary_metric, trend.law
    assert law is not None, "only fitted levels are drawn"
    name, role = f"{trend.factor}={trend.level}", SERIES[number]
    key = study.change_key(((trend.factor, trend.level),))
    points = []
    for index, (level, count) in enumerate(zip(trend.sizes, law.parameters, strict=True)):
        one = estimate([row[index] for row in law.differences])
        tip = (name, f"{level}: {format_number(count)} parameters", _with_unit(metric, one.value))
        bar = (one.low, one.high) if one.kind == "tested" else None
        points.append(Point(count, one.value, tip, key, y_range=bar))
    layers: list[Points | Line] = [Points(name, tuple(points), role)]
    targets = [one.parameters for one in _list_predictions(study, trend)]
    sizes = _spaced_sizes(law.parameters[0], max([*targets, law.parameters[-1]]))
    if not _is_predictable(trend):
        ends = [(size, math.fsum(law.by_seed(size)) / law.seeds) for size in sizes]
        return [*layers, Line("", tuple(Point(x, y, (name,), key) for x, y in ends), role)]
    predictions = [law.predict(size) for size in sizes]
    middle = tuple(Point(one.parameters, one.value, _tip(metric, name, one), key)
                   for one in predictions)  # fmt: skip
    low = tuple(Point(one.parameters, one.low, (name,), key) for one in predictions)
    high = tuple(Point(one.parameters, one.high, (name,), key) for one in predictions)
    bands = [Line("", low, role, dashed=True), Line("", high, role, dashed=True)]
    return [*layers, Line("", middle, role), *bands]


def _spaced_sizes(first: float, last: float) -> list[float]:
    ratio = (last / first) ** (1 / (_LINE_POINTS - 1))
    return [*(first * ratio**n for n in range(_LINE_POINTS - 1)), last]


def _with_unit(metric: str, value: float) -> str:
    return f"{format_difference(metric, value)} {difference_unit(metric)}".strip()


def _tip(metric: str, name: str, one: Prediction) -> tuple[str, ...]:
    ends = f"{format_difference(metric, one.low)} to {format_difference(metric, one.high)}"
    return (
        name,
        f"{format_number(one.parameters)} parameters",
        _with_unit(metric, one.value),
        f"95% prediction {ends}",
    )
