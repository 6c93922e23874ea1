"""At equal memory: the best cell within each budget, and those that may be best instead."""

from kvlab.analysis.study import Study
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Row,
    Section,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import (
    difference_unit,
    format_binary_size,
    format_magnitude,
    in_display_unit,
    short_title,
)
from kvlab.report.pareto_front import (
    BUDGET_CONTEXT,
    BudgetBest,
    best_cells_by_budget,
    bytes_per_context,
    describe_divergence,
)
from kvlab.report.table_columns import (
    baseline_difference_cells,
    baseline_difference_columns,
    names_cell,
    size_cell,
    size_column,
    title_with_unit,
    value_cell,
)
from kvlab.store.metrics import METRICS


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
    contents = (paragraph(text), _table(study, choices), paragraph(method))
    return Section("At equal memory", contents, is_appendix=True)


def _table(study: Study, bests: list[BudgetBest]) -> Table:
    metric, budget = study.primary_metric, f"budget per {BUDGET_CONTEXT:,} tokens"
    unit = difference_unit(metric)
    columns = (
        Column(budget, True, csv=(f"{budget} (bytes)",)),
        Column("cells that fit", True),
        Column("best cell"),
        size_column("its K/V cache", f"per {BUDGET_CONTEXT:,} tokens"),
        Column(title_with_unit(metric, short_title(metric)), True),
        *baseline_difference_columns(study),
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
            *baseline_difference_cells(study, point.levels),
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
