"""Pareto fronts of quality against bytes and time per token, and the best at equal memory."""

from kvlab.analysis.study import Study
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Figure,
    Fold,
    Row,
    Section,
    Span,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.figures.plot import Axis, Line, Plot, Point, Points
from kvlab.report.formatting import (
    PLUS_MINUS,
    difference_unit,
    display_unit,
    format_binary_size,
    format_magnitude,
    format_metric,
    in_display_unit,
    short_title,
)
from kvlab.report.hellaswag_outcomes import all_at_chance
from kvlab.report.overview import front_figure
from kvlab.report.pareto_front import (
    BUDGET_CONTEXT,
    COSTS,
    BudgetBest,
    CellPoint,
    Cost,
    best_cells_by_budget,
    bytes_per_context,
    cost_front,
    describe_divergence,
    is_relative,
    memory_front,
)
from kvlab.report.table_columns import (
    join_names,
    mean_and_spread,
    names_cell,
    reference_cells,
    reference_columns,
    size_cell,
    size_column,
    smaller_cell,
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
    note = paragraph(*_summarize(study, front, len(cell_points)))
    figure = front_figure(study)
    table = Fold("Cells on the front", (_table(study, front), paragraph(_describe_method(study))))
    contents: list[Content] = [note, *([figure] if figure else []), table]
    others = _other_fronts(study)
    if others or _describe_left_out(study):
        drawn = {pair: points for pair, points in others.items() if _is_drawn(study, *pair)}
        folded: list[Content] = [paragraph(_OTHERS + _describe_left_out(study))]
        folded += [_figure(study, *pair, points) for pair, points in drawn.items()]
        fronts = {(study.primary_metric, "stored"): cell_points, **others}
        folded += [_membership_table(study, fronts)] if others else []
        contents.append(Fold("Other fronts", tuple(folded)))
    return Section("Memory against quality", tuple(contents))


def _summarize(study: Study, front: list[CellPoint], n_cells: int) -> list[Span]:
    """Name the cells on the front."""
    title = METRICS[study.primary_metric].title
    are = "is" if len(front) == 1 else "are"
    relative = ", of its reference's," if is_relative(study) else ""
    against = " against its reference" if len(study.estimand.references) > 1 else ""
    return [
        f"{len(front)} of {format_count(n_cells, 'cell')} {are} on the front: ",
        Strong(join_names([study.label(point.levels) for point in front])),
        f". No other cell stores as few bytes{relative} with a better {title}{against}"
        f"{describe_divergence(study, tuple(study.diverged_cells))}.",
    ]


def _describe_method(study: Study) -> str:
    return (
        "Cells are placed by their paired difference from their reference. A cell is on"
        " the front beyond chance if it is better than every cell of at most its bytes. The table"
        " names the cells that it is not told apart from, at"
        f" {study.decide.alpha:g} for all cells together."
    )


_OTHERS = (
    "The same for other costs and qualities. Fewer heads and shorter windows reduce the bytes read"
    " per token; sharing does not."
)


def _describe_left_out(study: Study) -> str:
    """Say which fronts are left out, since they would be no finding."""
    text = ""
    if "tpot_ms_p50" in study.measured_metrics and study.timing_obstacle:
        text += f" There is no front of times. {study.timing_obstacle}."
    if _accuracy(study) in study.measured_metrics and all_at_chance(study, [_accuracy(study)]):
        text += " There is no front of HellaSwag: no accuracy is above chance within its error."
    return text


def _accuracy(study: Study) -> str:
    served = "hellaswag_acc_norm_served"
    return served if served in study.measured_metrics else "hellaswag_acc_norm"


def _other_fronts(study: Study) -> Fronts:
    """Return the primary metric against the other costs, and HellaSwag against every cost.

    Fronts that would be no finding are left out: of times that do not compare, and of accuracies at
    chance.
    """
    costs = [name for name in COSTS if name != "time" or not study.timing_obstacle]
    pairs = [(study.primary_metric, name) for name in costs if name != "stored"]
    accuracy = _accuracy(study)
    if accuracy in study.measured_metrics and not all_at_chance(study, [accuracy]):
        pairs += [(accuracy, name) for name in costs]
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
    rows = []
    for point in front:
        entries = (
            cell(study.label(point.levels)),
            size_cell(study.kv_bytes(point.levels) or 0),
            smaller_cell(study, point.levels),
            value_cell(metric, point.mean),
            *reference_cells(study, point.levels),
            names_cell(study, point.rivals),
        )
        rows.append(Row(entries, study.cell_key(point.levels)))
    columns = (
        Column("cell"),
        size_column("K/V cache", "one sequence at block size"),
        Column("smaller", True, "the reference's KV bytes divided by the cell's"),
        Column(title_with_unit(metric, short_title(metric)), True, "as ranked"),
        *reference_columns(study),
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


# At equal memory


def report_equal_memory(study: Study) -> Section | None:
    """Report the best cell within each memory budget that several cells fit."""
    bests = best_cells_by_budget(study)
    choices = [best for best in bests if best.n_fitting > 1]
    if not choices:
        return None
    base = bytes_per_context(study)[study.baseline]
    blocks = sorted({block for c in study.cells if (block := study.block_size(c))})
    confidence = f"{100 * (1 - study.decide.alpha):g}%"
    sizes = " or ".join(f"{block:,}" for block in blocks)
    text = (
        f"The best cell within each budget, by the {METRICS[study.primary_metric].title}. A budget"
        f" is in KV bytes per {BUDGET_CONTEXT:,} tokens of a sequence as long as the block size"
        f" ({sizes} tokens); the baseline takes {format_binary_size(base)}."
    )
    if len(choices) < len(bests):
        text += " Budgets that a single cell fits are left out."
    if study.diverged_cells:
        text += (
            f" Some cells are left out{describe_divergence(study, tuple(study.diverged_cells))}."
        )
    method = (
        "Cells are ranked by the baseline's mean plus the paired difference from it. The best is"
        " compared with the others by Hsu's multiple comparisons with the best: with"
        f" {confidence} probability the truly best cell of every budget is the one named, or one"
        " that may be the best instead."
    )
    contents = (paragraph(text), _budget_table(study, choices), paragraph(method))
    return Section("At equal memory", contents, is_appendix=True)


def _budget_table(study: Study, bests: list[BudgetBest]) -> Table:
    metric, budget = study.primary_metric, f"budget per {BUDGET_CONTEXT:,} tokens"
    unit = difference_unit(metric)
    columns = (
        Column(budget, True, csv=(f"{budget} (bytes)",)),
        Column("cells that fit", True),
        Column("best cell"),
        size_column("its K/V cache", f"per {BUDGET_CONTEXT:,} tokens"),
        Column(title_with_unit(metric, short_title(metric)), True),
        *reference_columns(study),
        Column("may be best instead", hint="cells that are not told apart from the best"),
        Column(f"worse than the best by at most ({unit})", True, _bound_hint(study)),
    )
    rows = tuple(_row(study, best) for best in bests)
    return Table("equal-memory", "The best cell in every budget.", columns, rows)


def _row(study: Study, best: BudgetBest) -> Row:
    metric, point = study.primary_metric, best.point
    return Row(
        (
            cell(format_binary_size(best.budget), best.budget),
            cell(f"{best.n_fitting:,}", best.n_fitting),
            cell(study.label(point.levels)),
            size_cell(round(point.cost)),
            value_cell(metric, point.mean),
            *reference_cells(study, point.levels),
            names_cell(study, best.choice.rivals),
            _loss_cell(metric, best.choice.largest_loss),
        ),
        study.cell_key(point.levels),
    )


def _bound_hint(study: Study) -> str:
    return f"{100 * (1 - study.decide.alpha):g}%, for all budgets together"


def _loss_cell(metric: str, loss: float | None) -> Cell:
    if loss is None:
        return EMPTY_CELL
    return Cell(format_magnitude(metric, loss), in_display_unit(metric, loss))
