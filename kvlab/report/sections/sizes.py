"""Effects over sizes of the model, and cells whose sizes were matched by the width of the MLP."""

import math
from collections.abc import Iterator
from functools import partial

from kvlab.analysis.effects import Effect, estimate_main_effects
from kvlab.analysis.scaling import Prediction, SizeTrend
from kvlab.analysis.statistics import estimate
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import judge_interval
from kvlab.humanize import format_number
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.spec.size_config import MATCH_FACTOR, MAX_EXTRAPOLATION, SIZES
from kvlab.store.metrics import METRICS

MAX_LINES = 4
"""Levels in the figure: each has points, a line and a band."""

_LINE_POINTS = 24


def report_size_trends(study: Study) -> doc.Section | None:
    """Report the trend of every level's effect over sizes, if the sweep has `size`."""
    trends = study.size_trends
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
        if trend.is_tested:
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
    if law is None or not trend.is_tested:
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
        f"{trend.factor}={trend.level}: {fmt.difference_with_unit(metric, trend.slope.value)}"
        f" per tenfold size, {trend.verdict}"
        for trend in fitted
        if trend.slope is not None
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
    if not trend.is_tested:
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


# Matched sizes


def report_matched_sizes(study: Study) -> doc.Section | None:
    """List the width and the size of every cell, and the effects with and without matching."""
    modes = [mode for mode in study.match_modes if mode in SIZES]
    if not modes:
        return None
    units = [SIZES[mode].unit for mode in modes]
    contents: list[doc.Content] = [texts.write("matched sizes", study=study, units=units)]
    caption = "Widths and sizes of the cells."
    table = cols.cells_table(study, "matched", caption, partial(_size_entries, study))
    contents += [table] if table.rows else []
    # sweeps with looks have judged their claims already, over all ways together
    if len(study.match_modes) > 1 and study.declared_looks is None:
        effects = list(_estimate_by_mode(study))
        rows = [
            (_mode_entries(study, mode, effect), study.change_key(effect.change))
            for mode, effect in effects
        ]
        if any(effect.estimate for _, effect in effects):
            caption = texts.fill("caption of matched effects", study=study)
            contents.append(doc.make_table("matched-effects", caption, rows))
    return doc.Section("Matched sizes", tuple(contents))


def _size_entries(study: Study, levels: Levels) -> doc.Entries:
    records = [row.record.get("experiment", {}) for row in study.cells[levels].values()]
    widths = [one["model"]["ffn_dim"] for one in records if "ffn_dim" in one.get("model", {})]
    parameters = study.parameters(levels)
    if not widths or parameters is None:
        return
    size_factor = (study.sweep.get("size") or {}).get("factor")
    baseline = tuple(  # at the cell's own level of the factor that is its size
        own if factor == size_factor else base
        for factor, own, base in zip(study.factors, levels, study.baseline, strict=True)
    )
    flops = _flops_per_token(study, levels)
    yield "matched in", doc.cell(study.match_mode(levels))
    yield "ffn_dim", int(widths[0])
    yield "parameters", parameters
    yield "FLOPs/token", cols.number_cell(flops, "{:,.0f}".format), "of training"
    for title, size, target in (
        ("parameters off (%)", parameters, study.parameters(baseline)),
        ("FLOPs off (%)", flops, _flops_per_token(study, baseline)),
    ):
        miss = 100 * (size / target - 1) if size and target else None
        cell = cols.number_cell(miss, lambda miss: fmt.format_signed(miss, 2) if miss else "0.00")
        yield doc.Column(title, True, "from the baseline's"), cell


def _flops_per_token(study: Study, levels: Levels) -> float | None:
    """Return a cell's training FLOPs a token; None if it was not trained."""
    for row in study.cells.get(levels, {}).values():
        tokens = (row.record.get("training_record") or {}).get("tokens")
        if tokens and "model" in row.record:
            return int(row.record["model"]["training_flops"]) / int(tokens)
    return None


def _estimate_by_mode(study: Study) -> Iterator[tuple[str, Effect]]:
    """Yield the effects within the cells of each way of matching, level by level.

    The error is shared by the ways, so that all rows hold together (Bonferroni).
    """
    index = list(study.factors).index(MATCH_FACTOR)
    by_mode = []
    for mode in study.match_modes:
        effects = estimate_main_effects(
            {levels: rows for levels, rows in study.cells.items() if levels[index] == mode},
            {**study.factors, MATCH_FACTOR: (mode,)},
            study.primary_metric,
            claims=study.claims,
            alpha=study.decide.alpha / len(study.match_modes),
            margin=study.decide.margin,
        )
        by_mode.append([(mode, effect) for effect in effects])
    for same_level in zip(*by_mode, strict=True):
        yield from same_level


def _mode_entries(study: Study, mode: str, effect: Effect) -> doc.Entries:
    metric, (factor, level) = study.primary_metric, effect.change[0]
    yield "factor", factor
    yield "level", level
    yield "sizes", mode, f"none: as the levels make them; else {MATCH_FACTOR}"
    difference = doc.EMPTY_CELL
    if effect.estimate:
        difference = cols.difference_cell(metric, effect.value)
    yield f"difference ({fmt.difference_unit(metric)})", difference
    hint = "holds for all rows of the table"
    interval = cols.simultaneous_column(metric, study.decide.alpha, hint)
    yield interval, cols.simultaneous_cell(metric, effect)
    yield "verdict", cols.verdict_cell(effect), "of the level at sizes matched so"
