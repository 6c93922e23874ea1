"""At equal memory: the best cell within each budget, compared with the second best."""

from kvlab.analysis.statistics import ALPHA, UNTESTED
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
    format_mebibytes,
    format_metric,
    short_title,
)
from kvlab.report.pareto_front import (
    BUDGET_CONTEXT,
    BudgetBest,
    best_cells_by_budget,
    bytes_per_context,
)
from kvlab.report.table_columns import (
    baseline_difference_cell,
    difference_cell,
    interval_column,
    range_cell,
    title_with_unit,
    value_cell,
)
from kvlab.store.metrics import METRICS


def report_equal_memory(study: Study) -> Section | None:
    """Report the best cell within each memory budget."""
    bests = list(best_cells_by_budget(study))
    if not bests:
        return None
    base = bytes_per_context(study)[study.baseline]
    blocks = sorted({block for c in study.cells if (block := study.block_size(c))})
    sizes = " or ".join(f"{block:,}" for block in blocks)
    note = paragraph(
        "Cells that fit in the same memory, ranked by the mean"
        f" {METRICS[study.primary_metric].title}. Budgets are KV bytes per {BUDGET_CONTEXT:,}"
        f" tokens of a sequence as long as the block size ({sizes} tokens); the baseline takes"
        f" {format_mebibytes(base)} MiB of them. The best of many is in part the luckiest:"
        " intervals between the two best do not allow for that.",
    )
    sentences = Bullets(tuple(_describe_best(study, best) for best in bests))
    return Section("At equal memory", (note, sentences, _table(study, bests)))


def _describe_best(study: Study, best: BudgetBest) -> tuple[Span, ...]:
    metric = study.primary_metric
    condition = best.condition[:1].upper() + best.condition[1:]
    spans: list[Span] = [
        f"{condition} the best cell is ",
        Strong(study.label(best.best.levels)),
        f" at {format_metric(metric, best.best.mean)} {display_unit(metric)}",
    ]
    if best.second is None:
        return (*spans, "; no other fits.")
    _, _, verdict = _compare_with_second(study, best)
    spans += ["; next is ", Strong(study.label(best.second.levels)), f" ({verdict})."]
    return tuple(spans)


def _table(study: Study, bests: list[BudgetBest]) -> Table:
    metric, budget = study.primary_metric, f"budget per {BUDGET_CONTEXT:,} tokens"
    unit = difference_unit(metric)
    columns = (
        Column(budget, True, csv=(f"{budget} (bytes)",)),
        Column("cells that fit", True),
        Column("best cell"),
        Column("its MiB", True, f"2^20 bytes per {BUDGET_CONTEXT:,} tokens"),
        Column(title_with_unit(metric, short_title(metric)), True),
        Column("against baseline", True, "paired by seed", (f"against baseline ({unit})",)),
        Column("next best"),
        Column(f"next minus best ({unit})", True, "paired by seed"),
        interval_column(metric, "of next minus best"),
        Column("verdict"),
    )
    rows = tuple(_row(study, best) for best in bests)
    return Table("equal-memory", "The best cell in every budget.", columns, rows)


def _row(study: Study, best: BudgetBest) -> Row:
    metric, point = study.primary_metric, best.best
    value, interval, verdict = _compare_with_second(study, best)
    second = cell(study.label(best.second.levels)) if best.second else EMPTY_CELL
    return Row(
        (
            cell(format_binary_size(best.budget), best.budget),
            cell(f"{best.n_fitting:,}", best.n_fitting),
            cell(study.label(point.levels)),
            cell(format_mebibytes(point.cost), point.cost / 2**20),
            value_cell(metric, point.mean),
            baseline_difference_cell(study, point.levels),
            second,
            value,
            interval,
            cell(verdict, tone="" if verdict == "told apart" else "muted"),
        ),
        study.cell_key(point.levels),
    )


def _compare_with_second(study: Study, best: BudgetBest) -> tuple[Cell, Cell, str]:
    """Return the second best minus the best: value, interval and verdict."""
    metric = study.primary_metric
    if best.second is None:
        return EMPTY_CELL, EMPTY_CELL, "alone"
    estimate = study.paired_difference(best.second.levels, best.best.levels, metric)
    if estimate is None:
        return EMPTY_CELL, EMPTY_CELL, "no shared seed"
    value = difference_cell(metric, estimate.value)
    if estimate.kind != "tested":
        return value, EMPTY_CELL, UNTESTED.get(estimate.kind, "told apart")
    n_cells = len(study.means(metric))
    n_pairs = n_cells * (n_cells - 1) // 2  # any two of them could have come out as the best
    verdict = "told apart" if estimate.p * n_pairs < ALPHA else "within noise"
    return value, range_cell(metric, estimate.low, estimate.high), verdict
