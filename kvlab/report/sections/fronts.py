"""Pareto fronts of quality against bytes and time per token, and the best at equal memory."""

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_bytes
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import pareto_front as fronts
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.hellaswag_outcomes import all_at_chance
from kvlab.report.overview import front_figure
from kvlab.report.pareto_front import BUDGET_CONTEXT, COSTS, BudgetBest, CellPoint


def report_pareto(study: Study) -> doc.Section | None:
    """Plot quality against each cost, and list the cells on the fronts."""
    points = fronts.memory_front(study)
    if not points:
        return None
    metric, figure = study.primary_metric, front_figure(study)
    on_front = {point.levels: point for point in points if point.is_on_front}
    names = cols.join_names([study.label(levels) for levels in on_front])
    fields = {"n": len(points), "names": names, "is_relative": fronts.is_relative(study)}
    diverged = fronts.describe_divergence(study)
    note = texts.write("front of memory", study=study, diverged=diverged, **fields)

    def entries(levels: Levels) -> doc.Entries:
        size = cols.size_column("K/V cache", "one sequence at block size")
        yield size, cols.size_cell(study.kv_bytes(levels) or 0)
        hint = "the reference's KV bytes divided by the cell's"
        yield "smaller", cols.smaller_cell(study, levels), hint
        column = doc.Column(cols.metric_title(metric), True, "as ranked")
        yield column, cols.value_cell(metric, on_front[levels].mean)
        yield from cols.reference_entries(study, levels)
        rivals = cols.names_cell(study, on_front[levels].rivals)
        hint = "cells of at most its bytes that may be as good"
        yield doc.Column("not told apart from", hint=hint), rivals

    table = cols.cells_table(study, "pareto", "The cells on the front.", entries, on_front)
    method = texts.write("membership of fronts", alpha=study.decide.alpha)
    contents: list[doc.Content] = [note, *([figure] if figure else [])]
    contents.append(doc.Fold("Cells on the front", (table, method)))
    others, left_out = _other_fronts(study)
    if others or any(left_out.values()):
        figures = (_figure(study, *pair, found) for pair, found in others.items())
        note = texts.write("other fronts", study=study, **left_out)
        contents.append(doc.Fold("Other fronts", (note, *figures)))
    return doc.Section("Memory against quality", tuple(contents))


def _other_fronts(study: Study) -> tuple[dict[tuple[str, str], list[CellPoint]], dict[str, bool]]:
    """Return the fronts of other costs and of HellaSwag, and which are left out.

    Fronts that would be no finding are left out: of times that do not compare, and of accuracies at
    chance.

    Returns:
        ``(metric, name of the cost)`` -> points of the cells; and what the text says of others.
    """
    measured = study.measured_metrics
    costs = [name for name in COSTS if name != "time" or not study.timing_obstacle]
    pairs = [(study.primary_metric, name) for name in costs if name != "stored"]
    accuracy = "hellaswag_acc_norm_served"
    accuracy = accuracy if accuracy in measured else "hellaswag_acc_norm"
    left_out = {
        "no_times": "tpot_ms_p50" in measured and bool(study.timing_obstacle),
        "no_accuracy": accuracy in measured and all_at_chance(study, [accuracy]),
    }
    if accuracy in measured and not left_out["no_accuracy"]:
        pairs.append((accuracy, "stored"))
    made = {pair: fronts.cost_front(study, pair[0], COSTS[pair[1]]) for pair in pairs}
    return {pair: points for pair, points in made.items() if points}, left_out


def _figure(study: Study, metric: str, name: str, points: list[CellPoint]) -> doc.Figure:
    cost = COSTS[name]
    front = [point for point in points if point.is_on_front]
    base = [point for point in points if point.levels == study.baseline]
    beaten = [point for point in points if not point.is_on_front and point not in base]

    def marks(shown: list[CellPoint], is_named: bool) -> tuple[doc.Point, ...]:
        return tuple(_mark(study, metric, name, point, is_named) for point in shown)

    # the best quality at each cost
    steps = doc.draw_steps((p.cost, fmt.in_display_unit(metric, p.mean)) for p in front)
    plot = doc.Plot(
        doc.Axis(cost.title, cost.scale),
        doc.Axis(cols.metric_title(metric)),
        (
            doc.Points("dominated", marks(beaten, False), "muted", "ring"),
            doc.Line("", steps, "c0", "dashed"),
            doc.Points("on the front", marks(front, True), "c0", "dot"),
            doc.Points("baseline", marks(base, True), "c1", "diamond"),
        ),
    )
    title = fmt.capitalize(cost.short_title)
    caption = texts.fill("caption of a front", cost=title, metric=fmt.short_title(metric))
    listed = "; ".join(
        f"{study.label(p.levels)}: {cost.format(p.cost)}, {fmt.format_metric(metric, p.mean)}"
        for p in front
    )
    stem = f"pareto-{name}" if metric == study.primary_metric else f"pareto-hellaswag-{name}"
    return doc.Figure(stem, caption, f"{caption} The front: {listed}.", plot)


def _mark(study: Study, metric: str, name: str, point: CellPoint, is_named: bool) -> doc.Point:
    """Return a cell's mark; a named one has a label and a bar of one standard deviation."""
    values, label = list(study.values(point.levels, metric).values()), study.label(point.levels)
    _, spread = cols.mean_and_spread(values)
    quality = fmt.format_metric(metric, point.mean)
    if spread is not None:
        quality += f" {fmt.PLUS_MINUS} {fmt.format_metric(metric, spread)}"
    tip = (
        label,
        COSTS[name].format(point.cost),
        f"{quality} {fmt.display_unit(metric)} (n = {len(values)})",
        ("perhaps" if point.rivals else "on the front") if point.is_on_front else "dominated",
    )
    mean, key, bar = fmt.in_display_unit(metric, point.mean), study.cell_key(point.levels), None
    if is_named and spread:
        reach = fmt.in_display_unit(metric, spread)
        bar = (mean - reach, mean + reach)
    return doc.Point(point.cost, mean, tip, key, label if is_named else "", y_range=bar)


def report_equal_memory(study: Study) -> doc.Section | None:
    """Report the best cell within each memory budget that several cells fit."""
    choices = [best for best in fronts.best_cells_by_budget(study) if best.n_fitting > 1]
    if not choices:
        return None
    base = format_bytes(fronts.bytes_per_context(study)[study.baseline])
    blocks = sorted({block for c in study.cells if (block := study.block_size(c))})
    fields = {"context": BUDGET_CONTEXT, "blocks": [f"{n:,}" for n in blocks], "base": base}
    diverged = fronts.describe_divergence(study)
    note = texts.write("equal memory", study=study, diverged=diverged, **fields)
    method = texts.write("best of a budget", confidence=100 * (1 - study.decide.alpha))
    rows = ((_budget_entries(study, b), study.cell_key(b.point.levels)) for b in choices)
    table = doc.make_table("equal-memory", "The best cell in every budget.", rows)
    contents = (note, table, method)
    return doc.Section("At equal memory", contents, is_appendix=True)


def _budget_entries(study: Study, best: BudgetBest) -> doc.Entries:
    metric, point = study.primary_metric, best.point
    title = f"budget per {BUDGET_CONTEXT:,} tokens"
    yield cols.size_column(title), cols.size_cell(best.budget)
    yield "cells that fit", best.n_fitting
    yield "best cell", study.label(point.levels)
    size = cols.size_column("its K/V cache", f"per {BUDGET_CONTEXT:,} tokens")
    yield size, cols.size_cell(round(point.cost))
    yield doc.Column(cols.metric_title(metric), True), cols.value_cell(metric, point.mean)
    yield from cols.reference_entries(study, point.levels)
    hint = "cells that are not told apart from the best"
    rivals = cols.names_cell(study, best.choice.rivals)
    yield doc.Column("may be best instead", hint=hint), rivals
    hint = f"{fmt.format_confidence(study.decide.alpha)}, for all budgets together"
    title = f"worse than the best by at most ({fmt.difference_unit(metric)})"
    yield title, cols.magnitude_cell(metric, best.choice.largest_loss), hint
