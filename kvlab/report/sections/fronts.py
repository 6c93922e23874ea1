"""Pareto fronts of quality against bytes and time per token, and the best at equal memory."""

from kvlab.analysis.rankings import Best
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
from kvlab.report.pareto_front import BUDGET_CONTEXT as _CONTEXT


def report_pareto(study: Study) -> doc.Section | None:
    """Plot quality against each cost, and list the cells on the fronts."""
    points = fronts.find_front(study)
    if not points:
        return None
    metric, figure = study.primary_metric, front_figure(study)
    on_front = {point.levels: point for point in points if point.is_on_front}
    names = cols.join_names([study.label(levels) for levels in on_front])
    fields = {"n": len(points), "names": names, "is_relative": fronts.is_relative(study)}
    diverged = fronts.describe_divergence(study)
    note = texts.write("front of memory", study=study, diverged=diverged, **fields)

    def entries(levels: Levels) -> doc.Entries:
        yield from cols.cache_entries(study, levels)
        column = doc.Column(cols.metric_title(metric), True, "as ranked")
        yield column, cols.value_cell(metric, on_front[levels].mean)
        yield from cols.reference_entries(study, levels)
        rivals = cols.names_cell(study, on_front[levels].rivals)
        hint = "cells of at most its bytes that may be as good"
        yield doc.Column("not told apart from", hint=hint), rivals

    table = cols.cells_table(study, "pareto", "The cells on the front.", entries, on_front)
    several = len(study.estimand.references) > 1
    method = texts.write("membership of fronts", alpha=study.decide.alpha, several=several)
    contents: list[doc.Content] = [note, *([figure] if figure else [])]
    contents.append(doc.Fold("Cells on the front", (table, method)))
    contents += _report_other_fronts(study)
    return doc.Section("Memory against quality", tuple(contents))


def _report_other_fronts(study: Study) -> list[doc.Content]:
    """Draw the fronts of other costs and of HellaSwag.

    Fronts that would be no finding are left out: of times that do not compare, and of accuracies at
    chance.
    """
    measured, accuracy = study.measured_metrics, "hellaswag_acc_norm_served"
    accuracy = accuracy if accuracy in measured else "hellaswag_acc_norm"
    left_out = {
        "no_times": "tpot_ms_p50" in measured and bool(study.timing_obstacle),
        "no_accuracy": accuracy in measured and all_at_chance(study, [accuracy]),
    }
    figures = [front_figure(study, "read")]
    figures += [] if study.timing_obstacle else [front_figure(study, "time")]
    if accuracy in measured and not left_out["no_accuracy"]:
        figures.append(front_figure(study, "stored", accuracy))
    drawn = [figure for figure in figures if figure is not None]
    if not drawn and not any(left_out.values()):
        return []
    note = texts.write("other fronts", study=study, **left_out)
    return [doc.Fold("Other fronts", (note, *drawn))]


def report_equal_memory(study: Study) -> doc.Section | None:
    """Report the best cell within each memory budget that several cells fit."""
    found = fronts.best_cells_by_budget(study).items()
    choices = [(budget, n, best) for budget, (n, best) in found if n > 1]
    if not choices:
        return None
    base = format_bytes(fronts.bytes_per_context(study)[study.baseline])
    blocks = sorted({block for c in study.cells if (block := study.block_size(c))})
    fields = {"context": _CONTEXT, "blocks": [f"{n:,}" for n in blocks], "base": base}
    diverged = fronts.describe_divergence(study)
    note = texts.write("equal memory", study=study, diverged=diverged, **fields)
    method = texts.write("best of a budget", confidence=100 * (1 - study.decide.alpha))
    rows = ((_budget_entries(study, *one), study.cell_key(one[-1].levels)) for one in choices)
    table = doc.make_table("equal-memory", "The best cell in every budget.", rows)
    contents = (note, table, method)
    return doc.Section("At equal memory", contents, is_appendix=True)


def _budget_entries(study: Study, budget: int, n_fitting: int, best: Best) -> doc.Entries:
    metric, levels = study.primary_metric, best.levels
    yield cols.size_column(f"budget per {_CONTEXT:,} tokens"), cols.size_cell(budget)
    yield "cells that fit", n_fitting
    yield "best cell", study.label(levels)
    size = cols.size_column("its K/V cache", f"per {_CONTEXT:,} tokens")
    yield size, cols.size_cell(round(fronts.bytes_per_context(study)[levels]))
    mean = cols.value_cell(metric, study.ranked_means(metric)[levels])
    yield doc.Column(cols.metric_title(metric), True), mean
    yield from cols.reference_entries(study, levels)
    hint = "cells that are not told apart from the best"
    yield doc.Column("may be best instead", hint=hint), cols.names_cell(study, best.rivals)
    hint = f"{fmt.format_confidence(study.decide.alpha)}, for all budgets together"
    title = f"worse than the best by at most ({fmt.difference_unit(metric)})"
    yield title, cols.magnitude_cell(metric, best.largest_loss), hint
