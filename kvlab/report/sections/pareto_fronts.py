"""Pareto fronts of quality against stored bytes, read bytes and time per token."""

from kvlab.analysis.study import Study
from kvlab.humanize import format_count
from kvlab.report.benchmark_lines import describe_timing_obstacle
from kvlab.report.document import (
    EMPTY_CELL,
    Column,
    Content,
    Figure,
    Heading,
    Row,
    Section,
    Table,
    cell,
    paragraph,
)
from kvlab.report.figures.plot import Axis, Line, Plot, Point, Points
from kvlab.report.formatting import (
    PLUS_MINUS,
    display_unit,
    format_mebibytes,
    format_megabytes,
    format_metric,
    format_ratio,
    in_display_unit,
    short_title,
)
from kvlab.report.hellaswag_outcomes import all_at_chance
from kvlab.report.pareto_front import (
    COSTS,
    CellPoint,
    Cost,
    cost_front,
    describe_divergence,
    memory_front,
)
from kvlab.report.table_columns import (
    baseline_difference_cells,
    baseline_difference_columns,
    mean_and_spread,
    names_cell,
    title_with_unit,
    value_cell,
)
from kvlab.store.metrics import METRICS

Fronts = dict[tuple[str, str], list[CellPoint]]
"""``(metric, name of the cost)`` -> points of the cells."""


def report_pareto(study: Study) -> Section | None:
    """Plot quality against each cost, and list the cells on the fronts."""
    cell_points = memory_front(study)
    if not cell_points:
        return None
    front = [point for point in cell_points if point.is_on_front]
    title = METRICS[study.primary_metric].title
    note = paragraph(
        f"A cell is on the front if no other cell stores as few bytes with a better {title};"
        f" {len(front)} of {format_count(len(cell_points), 'cell')} are."
        f"{describe_divergence(study, tuple(study.diverged_cells))} Cells are ranked by the"
        " baseline's mean plus the paired difference from it. A cell is on the front by more than"
        " chance if it is better than every cell of at most its bytes; the table names those that"
        " it is not told apart from, at"
        f" {study.decide.alpha:g} for all cells together. Bars of standard deviations over seeds"
        " contain what all cells share at a seed, which paired differences do not.",
    )
    figure = _figure(study, study.primary_metric, "stored", cell_points)
    contents: list[Content] = [note, figure, _table(study, front)]
    others = _other_fronts(study)
    if others:
        contents += [Heading("Other costs and qualities"), paragraph(_describe_others(study))]
        drawn = {pair: points for pair, points in others.items() if _is_drawn(study, *pair)}
        contents += [_figure(study, *pair, points) for pair, points in drawn.items()]
        fronts = {(study.primary_metric, "stored"): cell_points, **others}
        contents.append(_membership_table(study, fronts))
    return Section("Memory and time against quality", tuple(contents))


_OTHERS = (
    "The same for bytes read per decoded token, which heads and windows shrink and sharing does"
    " not, and for the measured time per token; and for HellaSwag, where it was scored."
)


def _describe_others(study: Study) -> str:
    obstacle = describe_timing_obstacle(study)
    if not obstacle or "tpot_ms_p50" not in study.measured_metrics:
        return _OTHERS
    return f"{_OTHERS} {obstacle}, so the front of times is no finding."


def _other_fronts(study: Study) -> Fronts:
    """Return the primary metric against the other costs, and HellaSwag against every cost."""
    served = "hellaswag_acc_norm_served"
    accuracy = served if served in study.measured_metrics else "hellaswag_acc_norm"
    pairs = [(study.primary_metric, name) for name in COSTS if name != "stored"]
    pairs += [(accuracy, name) for name in COSTS]
    fronts = {(m, name): cost_front(study, m, COSTS[name]) for m, name in pairs}
    return {pair: cell_points for pair, cell_points in fronts.items() if cell_points}


def _is_drawn(study: Study, metric: str, name: str) -> bool:
    """Whether a front is drawn: of HellaSwag's only that of stored bytes."""
    return metric == study.primary_metric or name == "stored"


def _figure(study: Study, metric: str, name: str, cell_points: list[CellPoint]) -> Figure:
    cost = COSTS[name]
    front = [point for point in cell_points if point.is_on_front]
    base = [point for point in cell_points if point.levels == study.baseline]
    dominated = [p for p in cell_points if not p.is_on_front and p.levels != study.baseline]

    def marks(shown: list[CellPoint], named: bool = False) -> tuple[Point, ...]:
        return tuple(_point(study, metric, cost, point, named) for point in shown)

    plot = Plot(
        Axis(cost.title, cost.scale),
        Axis(f"{short_title(metric)} ({display_unit(metric)})"),
        (
            Points("dominated", marks(dominated), "muted", "ring"),
            Line("", _steps(metric, front), "c0", True),
            Points("on the front", marks(front, True), "c0", "dot"),
            Points("baseline", marks(base, True), "c1", "diamond"),
        ),
    )
    front_text = "; ".join(
        f"{study.label(p.levels)}: {cost.format(p.cost)}, {format_metric(metric, p.mean)}"
        for p in front
    )
    has_spread = any(len(study.values(p.levels, metric)) > 1 for p in [*front, *base])
    bar_note = " Bars are standard deviations over seeds, of the front and the baseline alone."
    bar_note = bar_note if has_spread else ""
    title = cost.short_title[:1].upper() + cost.short_title[1:]
    step_note = " The dashed steps are what a budget buys: between two cells there is none."
    step_note = step_note if len(front) > 1 else ""
    caption = f"{title} against {short_title(metric)}: means over seeds.{step_note}{bar_note}"
    file = "pareto" if (metric, name) == (study.primary_metric, "stored") else f"pareto-{name}"
    if metric != study.primary_metric:
        file = f"pareto-hellaswag-{name}"
        if all_at_chance(study, [metric]):
            caption += " No accuracy is above chance within its error: this front is no finding."
    return Figure(file, caption, f"{caption} The front: {front_text}.", plot)


def _steps(metric: str, front: list[CellPoint]) -> tuple[Point, ...]:
    """Return the best quality at each cost, as a step function."""
    corners: list[Point] = []
    for point in front:
        quality = in_display_unit(metric, point.mean)
        if corners:
            corners.append(Point(point.cost, corners[-1].y))
        corners.append(Point(point.cost, quality))
    return tuple(corners)


def _point(study: Study, metric: str, cost: Cost, point: CellPoint, named: bool) -> Point:
    values = list(study.values(point.levels, metric).values())
    _, spread = mean_and_spread(values)
    deviation = "" if spread is None else f" {PLUS_MINUS} {format_metric(metric, spread)}"
    quality = f"{format_metric(metric, point.mean)}{deviation} {display_unit(metric)}"
    tip = (
        study.label(point.levels),
        cost.format(point.cost),
        f"{quality} (n = {len(values)})",
        _membership(point) if point.is_on_front else "dominated",
    )
    mean = in_display_unit(metric, point.mean)
    label = study.label(point.levels) if named else ""
    y_range = None
    if named and spread:
        y_range = (mean - in_display_unit(metric, spread), mean + in_display_unit(metric, spread))
    return Point(point.cost, mean, tip, study.cell_key(point.levels), label, y_range=y_range)


def _table(study: Study, front: list[CellPoint]) -> Table:
    metric = study.primary_metric
    base = study.kv_bytes(study.baseline)
    rows = []
    for point in front:
        ratio = base / point.cost if base else None
        entries = (
            cell(study.label(point.levels)),
            cell(f"{point.cost:,.0f}", point.cost),
            cell(format_megabytes(point.cost), point.cost / 10**6),
            cell(format_mebibytes(point.cost), point.cost / 2**20),
            EMPTY_CELL if ratio is None else cell(format_ratio(ratio), ratio),
            value_cell(metric, point.mean),
            *baseline_difference_cells(study, point.levels),
            names_cell(study, point.rivals),
        )
        rows.append(Row(entries, study.cell_key(point.levels)))
    columns = (
        Column("cell"),
        Column("KV bytes", True),
        Column("MB", True, "10^6 bytes"),
        Column("MiB", True, "2^20 bytes"),
        Column("smaller", True, "the baseline's KV bytes divided by the cell's"),
        Column(title_with_unit(metric, short_title(metric)), True, "as ranked"),
        *baseline_difference_columns(study),
        Column("not told apart from", hint="cells of at most its bytes that may be as good"),
    )
    return Table("pareto", "The cells on the front.", columns, tuple(rows))


def _membership_table(study: Study, fronts: Fronts) -> Table:
    """List the cells that are on a front, and on which."""
    by_front = [{p.levels: p for p in points if p.is_on_front} for points in fronts.values()]
    rows = []
    for levels in study.cells:
        points = [front.get(levels) for front in by_front]
        count = sum(point is not None for point in points)
        if count:
            marks = (cell(_membership(point)) for point in points)
            entries = (cell(study.label(levels)), *marks, cell(str(count), count))
            rows.append(Row(entries, study.cell_key(levels)))
    columns = tuple(Column(f"{short_title(m)} by {COSTS[name].short_title}") for m, name in fronts)
    caption = (
        "The cells that are on a front; every other cell is beaten everywhere. Perhaps: not told"
        " apart from a cell of at most its cost."
    )
    return Table("fronts", caption, (Column("cell"), *columns, Column("fronts", True)), tuple(rows))


def _membership(point: CellPoint | None) -> str:
    if point is None:
        return ""
    return "perhaps" if point.rivals else "on the front"
