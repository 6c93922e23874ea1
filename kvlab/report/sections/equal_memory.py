"""At equal memory: the best cell within each budget, and those that may be best instead."""

from kvlab.analysis.study import Study
from kvlab.report.document import (
    EMPTY_CELL,
    Bullets,
    Cell,
    Column,
    Row,
    Section,
    Span,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import (
    difference_unit,
    display_unit,
    format_binary_size,
    format_magnitude,
    format_mebibytes,
    format_metric,
    in_display_unit,
    short_title,
)
from kvlab.report.pareto_front import (
    BUDGET_CONTEXT,
    BudgetBest,
    best_cells_by_budget,
    bytes_per_context,
    describe_choice,
)
from kvlab.report.table_columns import (
    baseline_difference_cells,
    baseline_difference_columns,
    names_cell,
    title_with_unit,
    value_cell,
)
from kvlab.store.metrics import METRICS


def report_equal_memory(study: Study) -> Section | None:
    """Report the best cell within each memory budget."""
    bests = best_cells_by_budget(study)
    if not bests:
        return None
    base = bytes_per_context(study)[study.baseline]
    blocks = sorted({block for c in study.cells if (block := study.block_size(c))})
    confidence = f"{100 * (1 - study.decide.alpha):g}%"
    sizes = " or ".join(f"{block:,}" for block in blocks)
    note = paragraph(
        "Cells that fit in the same memory, ranked by the"
        f" {METRICS[study.primary_metric].title}: the baseline's mean plus the paired difference"
        f" from it, so that cells with other seeds compare. Budgets are KV bytes per"
        f" {BUDGET_CONTEXT:,} tokens of a sequence as long as the block size ({sizes} tokens); the"
        f" baseline takes {format_mebibytes(base)} MiB of them. A cell is told apart from the best"
        f" by a multiple comparison with the best (Hsu): with {confidence} probability the truly"
        " best cell"
        " of every budget is the one named or one that may be the best instead. A cell of which"
        " any trial diverged is not ranked.",
    )
    sentences = Bullets(tuple(_describe_best(study, best) for best in bests))
    return Section("At equal memory", (note, sentences, _table(study, bests)), is_appendix=True)


def _describe_best(study: Study, best: BudgetBest) -> tuple[Span, ...]:
    metric = study.primary_metric
    condition = best.condition[:1].upper() + best.condition[1:]
    return (
        f"{condition} the best cell is ",
        Strong(study.label(best.point.levels)),
        f" at {format_metric(metric, best.point.mean)} {display_unit(metric)}"
        f"{describe_choice(study, best)}.",
    )


def _table(study: Study, bests: list[BudgetBest]) -> Table:
    metric, budget = study.primary_metric, f"budget per {BUDGET_CONTEXT:,} tokens"
    unit = difference_unit(metric)
    columns = (
        Column(budget, True, csv=(f"{budget} (bytes)",)),
        Column("cells that fit", True),
        Column("best cell"),
        Column("its MiB", True, f"2^20 bytes per {BUDGET_CONTEXT:,} tokens"),
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
            cell(format_mebibytes(point.cost), point.cost / 2**20),
            value_cell(metric, point.mean),
            *baseline_difference_cells(study, point.levels),
            names_cell(study, best.choice.rivals),
            _loss_cell(metric, best.choice.largest_loss) if best.n_fitting > 1 else EMPTY_CELL,
        ),
        study.cell_key(point.levels),
    )


def _bound_hint(study: Study) -> str:
    return f"{100 * (1 - study.decide.alpha):g}%, for all budgets together"


def _loss_cell(metric: str, loss: float | None) -> Cell:
    if loss is None:
        return EMPTY_CELL
    return Cell(format_magnitude(metric, loss), in_display_unit(metric, loss))
