"""The first screen of a report: lead, facts, the front beside the effects, the ablation.

The figures are shared with the sections that are about them.
"""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from kvlab.analysis.cell_comparisons import CellComparison
from kvlab.analysis.effects import Effect
from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import CHEAP, WORSE
from kvlab.humanize import format_count, format_number
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.pareto_front import COSTS, CellPoint, find_front, is_relative
from kvlab.store.metrics import METRICS
from kvlab.store.provenance import describe_device

MAX_ROWS = 12
"""Rows of the compact table; the section of cells has all of them."""

FOCUS = 1.0
"""Cells further than so many times the height of the front are drawn at the edge."""

MAX_BEYOND = 4
"""Cells beyond the scale that are named with their difference."""


def report_overview(study: Study) -> list[doc.Content]:
    """Return the contents of a report's first screen."""
    contents: list[doc.Content] = [*write_lead(study), *_list_facts(study)]
    if study.is_untrained or not study.done_rows:
        return contents
    figures = [front_figure(study), effects_figure(study)]
    contents += [replace(figure, is_half=True) for figure in figures if figure is not None]
    contents.append(ablation_table(study))
    if others := _list_other_verdicts(study):
        contents.append(texts.write("verdicts of levels", others=others, most=MAX_NAMED))
    return contents


def _list_facts(study: Study) -> list[doc.Content]:
    """List the size of the models and of their training, the seeds, the device and the date."""
    recorded = [row.record for row in study.rows if row.record.get("provenance")]
    if not recorded:
        return []
    trainings = [one.get("training_record") or {} for one in recorded]
    counts = [one["model"]["parameters"] for one in recorded if "model" in one]
    tokens = [one["tokens"] for one in trainings if one.get("tokens")]
    provenance = [one["provenance"] for one in recorded]
    devices = dict.fromkeys(describe_device(one) for one in provenance if one.get("device"))
    facts = [
        f"{fmt.format_ends(counts, format_number)} parameters" if counts else "",
        f"{fmt.format_ends(tokens, format_number)} training tokens" if tokens else "",
        "nothing trained" if study.is_given else "",
        f"the baseline's K/V in {' or '.join(dtypes)}" if (dtypes := _list_dtypes(study)) else "",
        study.seeds_of_a_cell + (", each a part of the text" if study.scores_parts else ""),
        f"{len(study.done_rows):,} of {format_count(len(study.rows), 'trial')} measured",
        cols.join_names(list(devices)),
        max(str(one.get("finished") or "")[:10] for one in provenance),
    ]
    return [doc.Paragraph((" \N{MIDDLE DOT} ".join(filter(None, facts)),), tone="muted")]


def _list_dtypes(study: Study) -> list[str]:
    """List the dtypes of the baseline's cache, to which other bytes are compared."""
    records = [row.record for row in study.cells[study.baseline].values() if row.is_done]
    settings = [one["experiment"].get("serving") or {} for one in records]
    if any(one.get("kv_dtype", "model") != "model" for one in settings):
        return []
    lines = [line for one in records for line in one.get("benchmark") or ()]
    return sorted({line["dtype"] for line in lines if line.get("metric") == "kv_storage"})


# The figures


def front_figure(study: Study, cost: str = "stored", metric: str = "") -> doc.Figure | None:
    """Draw a cost against the paired difference from the reference, for every cell.

    Args:
        cost: A name in `COSTS`.
        metric: A metric with a better direction. Default: the one that decides.
    """
    metric, references = metric or study.primary_metric, set(study.estimand.references)
    points, several = find_front(study, cost, metric), len(references) > 1
    if not any(point.levels in references for point in points):
        return None
    mark = partial(_front_point, study, cost, metric)
    front = [point for point in points if point.is_on_front]
    bases = [mark(p, True) for p in points if p.levels in references]
    others = [p for p in points if p.levels not in references]
    better = [mark(p, True) for p in others if p.is_on_front]
    beaten = [mark(p, False) for p in others if not p.is_on_front]
    margin = _margin(study, "y") if metric == study.primary_metric else ()
    lines = (doc.Reference("y", 0.0), *margin)
    inside, outside = _split_by_scale(metric, beaten, better + bases, lines)
    steps = doc.draw_steps((p.cost, fmt.in_display_unit(metric, p.quality)) for p in front)
    name = "its reference" if several else "the baseline"
    axis = doc.Axis(COSTS[cost].title, COSTS[cost].scale)
    if is_relative(study, cost):
        axis = doc.Axis(f"{COSTS[cost].short_title} as a part of the reference's", "log")
    quality = f"{fmt.short_title(metric)} against {name} ({fmt.difference_unit(metric)})"
    plot = doc.Plot(
        axis,
        doc.Axis(quality),
        (
            doc.Points("dominated", tuple(inside), "muted"),
            doc.Points("beyond the scale", tuple(outside), "muted", "triangle"),
            doc.Line("", steps, "c0", "dashed"),
            doc.Points("on the front", tuple(better), "c0"),
            doc.Points("references" if several else "baseline", tuple(bases), "c1", "diamond"),
        ),
        lines,
    )
    is_decided = metric == study.primary_metric
    fields = {"cost": COSTS[cost].short_title, "metric": metric, "is_decided": is_decided}
    caption = texts.fill("caption of a front", study=study, name=name, outside=outside, **fields)
    stem = "pareto" if is_decided else "pareto-hellaswag"
    stem += f"-{cost}" if cost != "stored" or not is_decided else ""
    return doc.Figure(stem, caption, f"{caption} {doc.describe_points(plot)}", plot)


def _split_by_scale(
    metric: str, beaten: list[doc.Point], named: list[doc.Point], lines: tuple[doc.Reference, ...]
) -> tuple[list[doc.Point], list[doc.Point]]:
    """Split dominated cells into those near the front, and those far off, moved to the edge.

    A cell that is far worse would leave no height for the differences that are compared.
    """
    heights = [y for p in named for y in (p.y, *(p.y_range or ()), *p.seeds)]
    room = (max(heights) - min(heights)) * FOCUS
    low, high = min(heights) - room, max(heights) + room
    near = [p for p in beaten if low <= p.y <= high]
    far = [p for p in beaten if not low <= p.y <= high]
    if room <= GAP_ROUNDING or not far:  # what is as good as equal gives no scale
        return beaten, []
    heights += [*(point.y for point in near), *(line.value for line in lines)]
    low, high = min(heights), max(heights)
    edge = 0.12 * (high - low)
    moved = []
    for point in far:
        difference = fmt.format_difference(metric, point.y / fmt.in_display_unit(metric, 1.0))
        label = f"{point.tip[0]} {difference}" if len(far) <= MAX_BEYOND else ""
        moved.append(replace(point, y=high + edge if point.y > high else low - edge, label=label))
    return near, moved


def _front_point(
    study: Study, cost: str, metric: str, point: CellPoint, is_named: bool
) -> doc.Point:
    """Return a mark; a named one has a label, its interval and its differences seed by seed."""
    levels, reference = point.levels, study.estimand.reference(point.levels)
    found = study.comparisons.get(levels) if metric == study.primary_metric else None
    size = COSTS[cost].format(point.cost)
    if is_relative(study, cost):
        size = f"{fmt.format_percent(point.cost)} of its reference's bytes"
    if cost == "stored" and (factor := study.size_factor(levels)):
        size += f" ({fmt.format_ratio(factor)} less)"
    tip = [study.label(levels), size]
    tip.append(f"{fmt.short_title(metric)} {fmt.format_metric(metric, point.mean)}")
    ends: tuple[float, float] | None = None
    seeds: tuple[float, ...] = ()
    if levels != reference:
        tip.append(fmt.difference_with_unit(metric, point.quality))
        tip += [found.verdict] if found is not None and found.verdict else []
        base, own = study.values(reference, metric), study.values(levels, metric)
        shared = sorted(own.keys() & base.keys()) if found is None else found.seeds
        if is_named and len(shared) > 1:
            seeds = tuple(fmt.in_display_unit(metric, own[s] - base[s]) for s in shared)
    if is_named and found is not None and found.has_interval:
        ends = fmt.in_display_unit(metric, found.low), fmt.in_display_unit(metric, found.high)
    place = "a reference" if levels == reference else "dominated"
    tip.append("on the front" if point.is_on_front else place)
    y, key = fmt.in_display_unit(metric, point.quality), study.cell_key(levels)
    label = tip[0] if is_named else ""
    return doc.Point(point.cost, y, tuple(tip), key, label, y_range=ends, seeds=seeds)


def _margin(study: Study, axis: Literal["x", "y"]) -> tuple[doc.Reference, ...]:
    """Return the line of the margin, on the side of costs."""
    margin, metric = study.decide.margin, study.primary_metric
    if margin is None:
        return ()
    sign = -1.0 if METRICS[metric].better == "higher" else 1.0
    return (doc.Reference(axis, sign * fmt.in_display_unit(metric, margin), is_dashed=True),)


def effects_figure(study: Study) -> doc.Figure | None:
    """Draw the effect of every level on the primary metric, as a forest of intervals."""
    metric = study.primary_metric
    estimated = [effect for effect in study.effects(metric) if effect.estimate]
    if not estimated:
        return None
    groups = defaultdict[str, list[doc.Point]](list)
    for index, effect in enumerate(estimated):
        group = "open" if effect.is_tested else "untested"
        if effect.is_significant:
            group = "differs"
        elif effect.verdict_name in ("bounded", "equivalent"):
            group = "bounded"
        groups[group].append(_effect_point(study, effect, index))
    plot = doc.Plot(
        doc.Axis(f"difference in {fmt.short_title(metric)} ({fmt.difference_unit(metric)})"),
        doc.Axis("", "names", tuple(effect.name for effect in estimated)),
        (
            doc.Points("differs", tuple(groups["differs"]), "c1", "diamond"),
            doc.Points("costs less than the margin", tuple(groups["bounded"]), "c0", "square"),
            doc.Points("not told apart", tuple(groups["open"]), "muted"),
            doc.Points("not tested", tuple(groups["untested"]), "muted", "ring"),
        ),
        (doc.Reference("x", 0.0), *_margin(study, "x")),
    )
    caption, alt = texts.fill("caption of effects", study=study), doc.describe_points(plot)
    return doc.Figure("effects", caption, f"Differences against the baseline levels. {alt}", plot)


def _effect_point(study: Study, effect: Effect, index: int) -> doc.Point:
    metric = effect.metric
    tip = [effect.name, fmt.difference_with_unit(metric, effect.value)]
    if effect.has_interval:
        interval = fmt.format_interval(metric, effect.low, effect.high)
        tip.append(f"simultaneous {fmt.format_confidence(effect.alpha)} {interval}")
        tip.append(f"p (corrected) {fmt.format_p_value(effect.corrected_p)}")
    low, value, high = (
        fmt.in_display_unit(metric, end) for end in (effect.low, effect.value, effect.high)
    )
    tip.append(effect.verdict)
    by_seed = effect.by_seed if len(effect.by_seed) > 1 else ()
    seeds = tuple(fmt.in_display_unit(metric, one) for _, one in by_seed)
    ends, key = (low, high) if effect.has_interval else None, study.change_key(effect.change)
    return doc.Point(value, index, tuple(tip), key, x_range=ends, seeds=seeds)


# The table


def ablation_table(study: Study) -> doc.Table:
    """Return the compact ablation: each cell against its reference, with its cache."""
    cells = select_cells(study, MAX_ROWS)
    caption = texts.fill("caption of the ablation", study=study, shown=len(cells))
    measured = study.means(study.primary_metric)
    rows = (
        (_ablation_entries(study, levels, cells), study.cell_key(levels), levels not in measured)
        for levels in cells
    )
    return doc.make_table("ablation", caption, rows)


def _ablation_entries(study: Study, levels: Levels, cells: list[Levels]) -> doc.Entries:
    metric = study.primary_metric
    value, base = study.mean(levels, metric), study.parameters(study.baseline)
    mean = doc.EMPTY_CELL if value is None else cols.value_cell(metric, value)
    yield "cell", study.label(levels)
    yield doc.Column(cols.metric_title(metric), True), mean
    yield from cols.reference_entries(study, levels)
    yield cols.size_column("K/V cache"), cols.size_cell(study.kv_bytes(levels))
    yield doc.Column("smaller", True), cols.number_cell(study.size_factor(levels), fmt.format_ratio)
    if any(own and base and own != base for own in map(study.parameters, cells)):
        count = study.parameters(levels)
        change = count / base - 1 if count and base else None
        size = cols.number_cell(change, lambda c: f"{'+' if c > 0 else ''}{fmt.format_percent(c)}")
        yield doc.Column("parameters", True, csv=("change in parameters",)), size
    gaps = study.serving_gaps
    if any(abs(gaps[one].value) >= GAP_ROUNDING for one in cells if one in gaps):
        gap, shown = gaps.get(levels), doc.EMPTY_CELL
        if gap is not None:
            text = fmt.format_magnitude("serving_gap", 0.0)
            if abs(gap.value) >= GAP_ROUNDING:
                text = fmt.format_difference("serving_gap", gap.value)
            shown = doc.Cell(text, gap.value, "bad" if gap.is_found and gap.value > 0 else "")
        yield doc.Column("serving gap (nats/token)", True), shown


def select_cells(study: Study, most: int) -> list[Levels]:
    """Return the measured cells in the design's order, at most so many.

    The baseline is kept, then the cells on the front of memory against quality, the smallest
    first, then those that change one factor.
    """
    cells = [c for c, rows in study.cells.items() if any(row.is_done for row in rows.values())]
    if len(cells) <= most:
        return cells
    points = {point.levels: point for point in find_front(study)}
    placed = [point for point in points.values() if point.is_on_front]
    equals = {p.levels: [r for r in p.rivals if points[r].cost == p.cost] for p in placed}
    front = [one for levels, others in equals.items() for one in (levels, *others)]

    def rank(levels: Levels) -> tuple[int, int]:
        changed = study.n_changed_factors(levels)
        if changed and levels in front:
            return 1, front.index(levels)
        return 0 if not changed else 2 if changed == 1 else 3, study.cell_index(levels)

    return sorted(sorted(cells, key=rank)[:most], key=study.cell_index)


# The lead

MAX_NAMED = 3
"""Levels that the sentences name; the list of levels has all."""

SMALLER = 1.01
"""From this ratio on a cache is called smaller: the bytes of a few scores are no reduction."""

FROM_MARGIN, FROM_ZERO = 0.1, 0.1
"""Distances from which on an end is clearly below the margin, in margins, or above zero, in half
widths of the interval."""


def write_lead(study: Study) -> list[doc.Paragraph]:
    """Return the first sentences: the smallest caches that are shown to be cheap, or not to cost.

    Three things are said of the cells that store less than their reference: which is the smallest
    that is clearly shown to cost less than the margin, which smaller ones are not clearly shown to
    cost more, and which levels are clearly shown to cost. What saves no byte has a sentence of its
    own.

    The sentences are to stand when every loss moves a little, so they keep a distance from
    thresholds. A cell whose upper end is close to the margin is not clearly below it, on whichever
    side it is. Its interval is listed among those of the smallest caches. Cells are listed by size
    and levels in the order of the design, which do not move. Words of verdicts stand in the tables.
    """
    metric, factor = study.primary_metric, partial(_factor, study)
    if study.is_untrained:
        best = max(study.cells, key=factor)
        if factor(best) >= SMALLER:
            found = _describe_cell(study, best)
            return [texts.write("lead of one cell", "lead", study=study, best=found)]
    if not study.values(study.baseline, metric):
        text = f"No trial of the baseline has {fmt.short_title(metric)} yet: no cost is known."
        return [doc.Paragraph((text,), tone="lead")]
    smaller = [one for levels, one in study.comparisons.items() if factor(levels) >= SMALLER]
    free = _list_free_effects(study)
    costs = _list_costs(study, {effect.name for effect in free})
    shown = [(one, fmt.format_difference(metric, one.value)) for one in free if smaller]
    if smaller:
        lead = _judge_smaller(study, smaller)
    else:
        measured = [effect for effect in study.effects(metric) if effect.estimate]
        measured.sort(key=lambda one: (not one.is_claimed, -abs(one.value)))
        levels = [(one, _describe_difference(metric, one)) for one in measured[:MAX_NAMED]]
        whole = all(study.values(cell, metric) for cell in study.cells)
        fields = {"more": len(measured) - len(levels), "is_whole": whole}
        lead = texts.write("lead without smaller caches", "lead", levels=levels, **fields)
    if not costs and not shown:
        return [lead]
    kept = [pair for pair in shown if pair[0].change[0][0] in study.estimand.kept]
    shown = [pair for pair in shown if pair not in kept]
    return [lead, texts.write("costs", costs=costs, free=shown, kept=kept, most=MAX_NAMED)]


def _judge_smaller(study: Study, smaller: list[CellComparison]) -> doc.Paragraph:
    """Name the smallest cache that is clearly cheap, and smaller ones not shown to cost."""
    margin, metric = study.decide.margin, study.primary_metric
    factors = {one.levels: _factor(study, one.levels) for one in smaller}
    tested = [one for one in smaller if one.has_interval or one.verdict_name == "identical"]
    if not tested:
        front = {point.levels for point in find_front(study) if point.is_on_front}
        best = min(smaller, key=lambda one: (one.levels not in front, -factors[one.levels]))
        found = _describe_cell(study, best.levels)
        return texts.write("lead of one cell", "lead", study=study, best=found)
    limit = (1 - FROM_MARGIN) * (margin or 0.0)
    cheap = [c for c in tested if c.verdict_name in CHEAP and _costs(study, c)[1] <= limit]
    spared = [one for one in tested if not _is_clearly_worse(study, one)]
    if study.wrong_trainings:  # what is said holds without them, too
        others = study.without_wrong.comparisons
        also = {c for c, one in others.items() if one.verdict_name in CHEAP}
        also &= {c for c, one in others.items() if _costs(study, one)[1] <= limit}
        cheap = [one for one in cheap if one.levels in also]
        spared = [c for c in spared if not _is_clearly_worse(study, others.get(c.levels, c))]
    cheapest: dict[str, Any] = {}
    if cheap:
        # of caches of equal bytes, the one of which the least may be lost
        best = max(cheap, key=lambda one: (factors[one.levels], -_costs(study, one)[1]))
        worst = best.low if METRICS[metric].better == "higher" else best.high
        cheapest = _describe_cell(study, best.levels)
        cheapest |= {"found": best, "is_worse": _is_clearly_worse(study, best), "worst": worst}
        same = [one for one in cheap if one is not best and one.reference == best.reference]
        equals = [one.levels for one in same if factors[one.levels] == factors[best.levels]]
        told_apart = partial(study.ranking(metric).told_apart, best.levels)
        cheapest["equals"] = [study.label(one) for one in equals if not told_apart(one)]
        if not cheapest["is_worse"]:
            spared = [one for one in spared if factors[one.levels] > factors[best.levels]]
    elif not spared:
        best = min(tested, key=lambda one: _costs(study, one)[1])
        found = _describe_cell(study, best.levels)
        return texts.write("lead of costly caches", "lead", study=study, best=found)
    spared.sort(key=lambda one: factors[one.levels], reverse=True)
    fields = {"spared": [_describe_cell(study, one.levels) for one in spared], "most": MAX_NAMED}
    return texts.write("lead", "lead", study=study, best=cheapest, **fields)


def _factor(study: Study, levels: Levels) -> float:
    return study.size_factor(levels) or 0.0


def _describe_cell(study: Study, levels: Levels) -> dict[str, Any]:
    """Return what sentences say of a cell beside its reference: bytes, tokens and quality."""
    reference, found = study.estimand.reference(levels), study.comparisons.get(levels)
    fields = {
        "name": study.label(levels),
        "factor": fmt.format_ratio(study.size_factor(levels) or 1.0),
        "reference": "" if reference == study.baseline else study.label(reference),
        "tokens": 1.0 if found is None else found.token_factor or 1.0,
    }
    return fields if found is None else fields | _describe_difference(study.primary_metric, found)


def _describe_difference(metric: str, one: CellComparison | Effect) -> dict[str, Any]:
    return {
        "value": fmt.format_difference(metric, one.value),
        "value_with_unit": fmt.difference_with_unit(metric, one.value),
        "cost": f"{fmt.format_cost(metric, one.value)} {fmt.difference_unit(metric)}".strip(),
        "interval": fmt.format_interval(metric, one.low, one.high) if one.has_interval else "",
    }


def _costs(study: Study, one: CellComparison | Effect) -> tuple[float, float]:
    """Return the least and the most that is lost: the ends of an interval, as losses."""
    has_ends = isinstance(one, Effect) or one.has_interval  # exact ones have equal ends
    low, high = (one.low, one.high) if has_ends else (0.0, 0.0)
    return (-high, -low) if METRICS[study.primary_metric].better == "higher" else (low, high)


def _is_clearly_worse(study: Study, one: CellComparison | Effect) -> bool:
    """Return whether a cost is shown, and would be if the interval were a little wider."""
    least, most = _costs(study, one)
    return one.verdict_name in WORSE and least > FROM_ZERO * (most - least) / 2


def list_close_to_margin(study: Study) -> list[tuple[str, str]]:
    """Return the levels and cells whose interval ends close to the margin, on either side."""
    margin, metric = study.decide.margin or 0.0, study.primary_metric
    found: list[Effect | CellComparison] = [*study.effects(metric)]
    found += [one for one in study.comparisons.values() if one.effect is None]
    close = []
    for one in found:
        worst = _costs(study, one)[1]
        if one.has_interval and abs(worst - margin) < FROM_MARGIN * margin:
            name = one.name if isinstance(one, Effect) else study.label(one.levels)
            sign = -1.0 if METRICS[metric].better == "higher" else 1.0
            close.append((name, fmt.format_difference(metric, sign * worst)))
    return close


def _list_other_verdicts(study: Study) -> list[tuple[str, str, str, str]]:
    """Return the cells that are judged otherwise than the level in which they differ.

    Each with its verdict, the level, and the level's verdict.
    """
    found = {study.cell_key(levels): one for levels, one in study.comparisons.items()}
    others = []
    for effect in study.effects(study.primary_metric):
        if any(level != study.factors[factor][0] for factor, level in effect.at):
            continue  # its cell differs from the reference in more levels
        cell = found.get(study.change_key(effect.change))
        if cell and effect.estimate and cell.verdict and cell.verdict != effect.verdict:
            others.append((study.label(cell.levels), cell.verdict, effect.name, effect.verdict))
    return others


def _list_costs(study: Study, free: set[str]) -> dict[str, str]:
    """Return the levels that are clearly shown to cost and by how much, in the design's order.

    A level of serving is judged in every setting apart: its largest cost is named.
    """
    effects = [one for one in study.effects(study.primary_metric) if one.name not in free]
    worse = [effect for effect in effects if _is_clearly_worse(study, effect)]
    found: dict[str, str] = {}
    for effect in worse:
        value = fmt.format_cost(effect.metric, effect.value)
        if effect.at and study.estimand.changes_serving_alone(effect.change):
            same = [one for one in effects if one.claim == effect.claim]
            shown = [one for one in worse if one.claim == effect.claim]
            largest = max(shown, key=lambda one: abs(one.value))
            value = f"up to {fmt.format_cost(effect.metric, largest.value)}"
            found[effect.claim] = f"{value} in {len(shown)} of {len(same)} settings"
        else:
            found[effect.name] = value
    return found


def _list_free_effects(study: Study) -> list[Effect]:
    """Return what factors do that save no byte, where it is more than the margin."""
    free, margin = study.estimand.free_levels, study.decide.margin or 0.0
    if len(study.estimand.references) < 2:
        return []
    return [
        effect
        for effect in study.effects(study.primary_metric)
        if all((effect.change[0][0], one) in free for one in study.factors[effect.change[0][0]][1:])
        and effect.is_significant
        and abs(effect.value) >= margin
    ]
