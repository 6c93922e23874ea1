"""Tables that compare cells with the baseline on the same items, each right or wrong."""

from kvlab.analysis.statistics import ItemComparison
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.document import Column, Row, Table, Tone, cell
from kvlab.report.formatting import format_p_value, format_signed
from kvlab.report.hellaswag_outcomes import Outcomes, compare_with_baseline
from kvlab.report.table_columns import range_cell, simultaneous_column

ITEM_METHOD = (
    "Both cells answer the same items, so a test counts the items that only one of them gets right:"
    " McNemar's exact test with one seed. With several seeds an item counts once, by the number of"
    " seeds by which one cell is ahead, and the signs of these numbers are flipped. The interval"
    " inverts that test and holds for all cells of a table together; the verdict is read from it."
    " It covers another draw of items, not of seeds, so a verdict is about these weights. The"
    " effects test the architecture over seeds."
)


def make_item_table(
    study: Study, outcomes: Outcomes, metric: str, name: str, title: str
) -> Table | None:
    """Return every cell's comparison with the baseline on the same items; None without pairs.

    Args:
        study: The study.
        outcomes: Metric -> trial -> one byte per item, 0 or 1.
        metric: The share of right items.
        name: Of the table.
        title: What is compared, for the caption.
    """
    comparisons: list[tuple[Levels, ItemComparison]] = []
    for levels in study.cells:
        if levels != study.baseline:
            comparison = compare_with_baseline(study, outcomes, metric, levels)
            if comparison is not None:
                comparisons.append((levels, comparison))
    if not comparisons:
        return None
    alpha = study.decide.alpha / len(comparisons)
    rows = tuple(_comparison_row(study, c, comparison, alpha) for c, comparison in comparisons)
    columns = (
        Column("cell"),
        Column("difference (points)", True),
        simultaneous_column(metric, study.decide.alpha, "over items, for all cells together"),
        Column("gained", True, "items that only this cell gets right, over all seeds"),
        Column("lost", True, "items that only the baseline gets right, over all seeds"),
        Column("p", True),
        Column("p (all cells)", True, "corrected for the cells of this table"),
        Column("these weights"),
    )
    sizes = {(comparison.items, comparison.seeds) for _, comparison in comparisons}
    sizes_text = " or ".join(f"{i:,} items at {format_count(s, 'seed')}" for i, s in sorted(sizes))
    caption = f"{title}, against the baseline on {sizes_text}."
    return Table(name, caption, columns, rows)


def _comparison_row(study: Study, levels: Levels, comparison: ItemComparison, alpha: float) -> Row:
    low, high = comparison.interval(alpha)
    corrected_p = min(1.0, comparison.p * study.decide.alpha / alpha)
    is_significant = low > 0 or high < 0
    verdict = (
        ("more right" if comparison.difference > 0 else "fewer right")
        if is_significant
        else "within noise"
    )
    tone: Tone = ("good" if comparison.difference > 0 else "bad") if is_significant else "muted"
    return Row(
        (
            cell(study.label(levels)),
            cell(format_signed(100 * comparison.difference, 2), 100 * comparison.difference),
            range_cell("hellaswag_acc_norm", low, high),
            cell(f"{comparison.gained:,}", comparison.gained),
            cell(f"{comparison.lost:,}", comparison.lost),
            cell(format_p_value(comparison.p), comparison.p),
            cell(format_p_value(corrected_p), corrected_p),
            cell(verdict, tone=tone),
        ),
        study.cell_key(levels),
    )
