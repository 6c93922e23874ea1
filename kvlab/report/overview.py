"""The first screen of a report: lead, facts, the front beside the effects, the ablation.

The figures are shared with the sections that are about them.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from kvlab.analysis.effects import Effect
from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.humanize import format_count, format_number
from kvlab.report.ablation import AblationRow, list_ablation
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Figure,
    Paragraph,
    Row,
    Table,
    cell,
)
from kvlab.report.figures.plot import Axis, Line, Plot, Point, Points, Reference
from kvlab.report.formatting import (
    difference_unit,
    format_binary_size,
    format_difference,
    format_magnitude,
    format_metric,
    format_p_value,
    format_percent,
    format_ratio,
    in_display_unit,
    short_title,
)
from kvlab.report.lead import write_lead
from kvlab.report.pareto_front import CellPoint, is_relative, memory_front
from kvlab.report.table_columns import (
    reference_cells,
    reference_columns,
    size_cell,
    size_column,
    smaller_cell,
    title_with_unit,
    value_cell,
)
from kvlab.store.metrics import METRICS
from kvlab.store.provenance import describe_device

MAX_ROWS = 12
"""Rows of the compact table; the section of cells has all of them."""


def report_overview(study: Study) -> list[Content]:
    """Return the contents of a report's first screen."""
    contents: list[Content] = [*write_lead(study), *_list_facts(study)]
    if study.is_untrained or not study.done_rows:
        return contents
    figures = [front_figure(study), effects_figure(study)]
    contents += [replace(figure, is_half=True) for figure in figures if figure is not None]
    return [*contents, ablation_table(study)]


# The facts


def _list_facts(study: Study) -> list[Content]:
    """List the size of the models and of their training, the seeds, the device and the date."""
    recorded = [row.record for row in study.rows if row.record.get("provenance")]
    if not recorded:
        return []
    sizes = [one["model"]["parameters"] for one in recorded if "model" in one]
    tokens = [
        one["experiment"]["training"]["tokens"]
        for one in recorded
        if one.get("experiment", {}).get("training", {}).get("tokens")
    ]
    provenance = [one["provenance"] for one in recorded]
    devices = list(dict.fromkeys(describe_device(one) for one in provenance if one.get("device")))
    dates = sorted(str(one["finished"])[:10] for one in provenance if one.get("finished"))
    facts = [
        _range(sizes, "parameters"),
        _range(tokens, "training tokens"),
        format_count(len(study.seeds), "seed"),
        f"{len(study.done_rows):,} of {format_count(len(study.rows), 'trial')} measured",
        ", ".join(devices[:3]) + (f" and {len(devices) - 3} more" if len(devices) > 3 else ""),
        dates[-1] if dates else "",
    ]
    return [Paragraph((" \N{MIDDLE DOT} ".join(filter(None, facts)),), tone="muted")]


def _range(values: list[float], noun: str) -> str:
    if not values:
        return ""
    low, high = format_number(min(values)), format_number(max(values))
    return f"{low} {noun}" if low == high else f"{low} to {high} {noun}"


# The figures


def front_figure(study: Study) -> Figure | None:
    """Draw stored bytes against the paired difference from the reference, for every cell."""
    points = memory_front(study)
    references = set(study.estimand.references)
    if not any(point.levels in references for point in points):
        return None
    metric, several = study.primary_metric, len(references) > 1
    front = [point for point in points if point.is_on_front]
    rows = {row.levels: row for row in list_ablation(study, len(study.cells))}

    def marks(shown: Iterable[CellPoint], is_named: bool) -> tuple[Point, ...]:
        return tuple(_front_point(study, one, rows[one.levels], is_named) for one in shown)

    bases = [p for p in points if p.levels in references]
    beaten = [p for p in points if not p.is_on_front and p.levels not in references]
    on_front = marks((p for p in front if p.levels not in references), True)
    named = (*on_front, *marks(bases, True))
    inside, outside = _split_by_scale(study, marks(beaten, False), named)
    name, base_name = "the baseline", "baseline"
    if several:
        name, base_name = "its reference", "references"
    size = "K/V cache of one sequence at block size"
    if is_relative(study):
        size = "K/V cache as a part of the reference's"
    plot = Plot(
        Axis(size, "log" if is_relative(study) else "bytes"),
        Axis(f"{short_title(metric)} against {name} ({difference_unit(metric)})"),
        (
            Points("dominated", inside, "muted"),
            Points("beyond the scale", outside, "muted", "triangle"),
            Line("", _steps(study, front), "c0", True),
            Points("on the front", on_front, "c0"),
            Points(base_name, named[len(on_front) :], "c1", "diamond"),
        ),
        (Reference("y", 0.0), *_margin(study, "y")),
    )
    listed = "; ".join(
        f"{study.label(p.levels)}: {_size_text(study, p)}, {format_difference(metric, p.quality)}"
        for p in front
    )
    caption = (
        f"Cache size against quality: paired differences from {name}"
        f"{_describe_marks(study)} The dashed steps are the front."
    )
    if outside:
        caption += " Triangles at the edge are cells beyond the scale."
    return Figure("pareto", caption, f"{caption} {listed}.", plot)


def _size_text(study: Study, point: CellPoint) -> str:
    if is_relative(study):
        return f"{format_percent(point.cost)} of its reference's bytes"
    return format_binary_size(round(point.cost))


_FOCUS = 1.0
"""Cells further than so many times the height of the front are drawn at the edge."""

_MAX_BEYOND = 4
"""Cells beyond the scale that are named with their difference."""


def _split_by_scale(
    study: Study, beaten: tuple[Point, ...], named: tuple[Point, ...]
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Split dominated cells into those near the front, and those far off, moved to the edge.

    A cell that is far worse would leave no height for the differences that are compared.
    """
    metric = study.primary_metric
    heights = [y for p in named for y in (p.y, *(p.y_range or ()), *p.seeds)]
    low, high = min(heights), max(heights)
    room = (high - low) * _FOCUS
    far = [p for p in beaten if not low - room <= p.y <= high + room]
    if not room or not far:
        return beaten, ()
    near = tuple(p for p in beaten if low - room <= p.y <= high + room)
    low, high = min([low, *(p.y for p in near)]), max([high, *(p.y for p in near)])
    edge = 0.12 * (high - low)
    moved = []
    for point in far:
        text = f"{point.tip[0]} {format_difference(metric, _from_display(metric, point.y))}"
        label = text if len(far) <= _MAX_BEYOND else ""
        moved.append(replace(point, y=high + edge if point.y > high else low - edge, label=label))
    return near, tuple(moved)


def _from_display(metric: str, value: float) -> float:
    return value / in_display_unit(metric, 1.0)


def _describe_marks(study: Study) -> str:
    if len(study.seeds) == 1:
        return ", at one seed."
    bars = f"simultaneous {100 * (1 - study.decide.alpha):g}% intervals"
    return f", with {bars} and a small dot for each seed."


def _front_point(study: Study, point: CellPoint, row: AblationRow, is_named: bool) -> Point:
    metric, levels = study.primary_metric, point.levels
    factor = f" ({format_ratio(row.kv_factor)} less)" if row.kv_factor else ""
    tip = [study.label(levels), f"{_size_text(study, point)}{factor}"]
    tip.append(f"{short_title(metric)} {format_metric(metric, point.mean)}")
    ends = None
    if row.found is not None:
        tip.append(
            f"{format_difference(metric, row.found.value)} {difference_unit(metric)}".strip()
        )
        tip += [row.found.verdict] if row.verdict_name else []
    if is_named and row.interval is not None:
        low, high = (in_display_unit(metric, end) for end in row.interval)
        ends = (low, high)
    tip.append("on the front" if point.is_on_front else "dominated")
    seeds = _seed_differences(study, row) if is_named else ()
    label = study.label(levels) if is_named else ""
    difference = in_display_unit(metric, point.quality)
    key = study.cell_key(levels)
    return Point(point.cost, difference, tuple(tip), key, label, y_range=ends, seeds=seeds)


def _seed_differences(study: Study, row: AblationRow) -> tuple[float, ...]:
    """Return a cell's differences from its reference, seed by seed."""
    if row.found is None or len(row.found.seeds) < 2:
        return ()
    metric = study.primary_metric
    base, values = study.values(row.found.reference, metric), study.values(row.levels, metric)
    return tuple(in_display_unit(metric, values[seed] - base[seed]) for seed in row.found.seeds)


def _steps(study: Study, front: list[CellPoint]) -> tuple[Point, ...]:
    """Return the best quality at each size, as a step function."""
    corners: list[Point] = []
    for point in front:
        difference = in_display_unit(study.primary_metric, point.quality)
        if corners:
            corners.append(Point(point.cost, corners[-1].y))
        corners.append(Point(point.cost, difference))
    return tuple(corners)


def _margin(study: Study, axis: str) -> tuple[Reference, ...]:
    """Return the line of the margin, on the side of costs."""
    margin, metric = study.decide.margin, study.primary_metric
    if margin is None:
        return ()
    sign = -1.0 if METRICS[metric].better == "higher" else 1.0
    value = sign * in_display_unit(metric, margin)
    return (Reference("x" if axis == "x" else "y", value, is_dashed=True),)


def effects_figure(study: Study) -> Figure | None:
    """Draw the effect of every level on the primary metric, as a forest of intervals."""
    metric = study.primary_metric
    estimated = [effect for effect in study.effects(metric) if effect.estimate]
    if not estimated:
        return None
    unit, groups = difference_unit(metric), defaultdict[str, list[Point]](list)
    for index, effect in enumerate(estimated):
        groups[_group(effect)].append(_effect_point(study, effect, index))
    plot = Plot(
        Axis(f"difference in {short_title(metric)} ({unit})"),
        Axis("", "names", tuple(effect.name for effect in estimated)),
        (
            Points("differs", tuple(groups["differs"]), "c1", "diamond"),
            Points("costs less than the margin", tuple(groups["bounded"]), "c0", "square"),
            Points("not told apart", tuple(groups["open"]), "muted"),
            Points("not tested", tuple(groups["untested"]), "muted", "ring"),
        ),
        (Reference("x", 0.0), *_margin(study, "x")),
    )
    alt = "; ".join(
        f"{effect.name}: {format_difference(metric, effect.value)} {unit}, {effect.verdict}"
        for effect in estimated
    )
    caption = f"Effect of each level against its factor's baseline level{_describe_marks(study)}"
    if study.decide.margin is not None:
        caption += " The dashed line is the margin."
    return Figure("effects", caption, f"Differences against the baseline levels. {alt}.", plot)


def _group(effect: Effect) -> str:
    if effect.is_significant:
        return "differs"
    if effect.verdict_name in ("bounded", "equivalent"):
        return "bounded"
    return "open" if effect.is_tested else "untested"


def _effect_point(study: Study, effect: Effect, index: int) -> Point:
    metric = effect.metric
    tip = [effect.name, f"{format_difference(metric, effect.value)} {difference_unit(metric)}"]
    ends = None
    if effect.has_interval:
        low, high = (format_difference(metric, end) for end in (effect.low, effect.high))
        tip.append(f"simultaneous {100 * (1 - effect.alpha):g}% {low} to {high}")
        tip.append(f"p (corrected) {format_p_value(effect.corrected_p)}")
        ends = in_display_unit(metric, effect.low), in_display_unit(metric, effect.high)
    seeds = tuple(in_display_unit(metric, value) for _, value in effect.by_seed)
    return Point(
        in_display_unit(metric, effect.value),
        index,
        (*tip, effect.verdict),
        study.change_key(effect.change),
        x_range=ends,
        seeds=seeds if len(seeds) > 1 else (),
    )


# The table


def ablation_table(study: Study) -> Table:
    """Return the compact ablation: each cell against its reference, with its cache."""
    metric = study.primary_metric
    rows = list_ablation(study, MAX_ROWS)
    has_gap = any(row.gap is not None and abs(row.gap.value) >= GAP_ROUNDING for row in rows)
    has_size = any(row.parameter_change for row in rows)
    columns = (
        Column("cell"),
        Column(title_with_unit(metric, short_title(metric)), True),
        *reference_columns(study),
        size_column("K/V cache"),
        Column("smaller", True),
        *((Column("parameters", True, csv=("change in parameters",)),) if has_size else ()),
        *((Column("serving gap (nats/token)", True),) if has_gap else ()),
    )
    of = "its reference" if len(study.estimand.references) > 1 else "the baseline"
    caption = f"The ablation: each cell against {of}, with the size of its cache."
    if len(rows) < len(study.cells):
        caption += f" {len(rows)} of {format_count(len(study.cells), 'cell')}: the front and single"
        caption += " changes first; the section of cells has all."
    made = tuple(_ablation_row(study, row, has_size, has_gap) for row in rows)
    return Table("ablation", caption, columns, made)


def _ablation_row(study: Study, row: AblationRow, has_size: bool, has_gap: bool) -> Row:
    change = row.parameter_change
    gap = EMPTY_CELL
    if row.gap is not None:
        is_found = row.gap.is_found and row.gap.value > 0
        gap = Cell(
            format_magnitude("serving_gap", 0.0)
            if abs(row.gap.value) < GAP_ROUNDING
            else format_difference("serving_gap", row.gap.value),
            row.gap.value,
            "bad" if is_found else "",
        )
    cells: tuple[Cell, ...] = (
        cell(study.label(row.levels)),
        EMPTY_CELL if row.value is None else value_cell(study.primary_metric, row.value),
        *reference_cells(study, row.levels),
        EMPTY_CELL if row.kv_bytes is None else size_cell(row.kv_bytes),
        smaller_cell(study, row.levels),
    )
    if has_size:
        text = "" if change is None else f"{'+' if change > 0 else ''}{format_percent(change)}"
        cells += (EMPTY_CELL if change is None else Cell(text, change),)
    if has_gap:
        cells += (gap,)
    return Row(cells, study.cell_key(row.levels), "" if row.seeds else "muted")
