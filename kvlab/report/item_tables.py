"""Tables that compare cells with the baseline on the same items, each right or wrong."""

from kvlab.analysis.statistics import ItemComparison
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.document import Column, Row, Table, cell
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
    found: dict[Levels, ItemComparison] = {}
    for levels in study.cells:
        compared = compare_with_baseline(study, outcomes, metric, levels)
        if levels != study.baseline and compared is not None:
            found[levels] = compared
    if not found:
        return None
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
    rows = []
    for levels, one in found.items():
        low, high = one.interval(study.decide.alpha / len(found))
        corrected_p = min(1.0, one.p * len(found))
        verdict = cell("within noise", tone="muted")
        if low > 0 or high < 0:
            is_better = one.difference > 0
            verdict = (
                cell("more right", tone="good") if is_better else cell("fewer right", tone="bad")
            )
        cells = (
            cell(study.label(levels)),
            cell(format_signed(100 * one.difference, 2), 100 * one.difference),
            range_cell("hellaswag_acc_norm", low, high),
            cell(f"{one.gained:,}", one.gained),
            cell(f"{one.lost:,}", one.lost),
            cell(format_p_value(one.p), one.p),
            cell(format_p_value(corrected_p), corrected_p),
            verdict,
        )
        rows.append(Row(cells, study.cell_key(levels)))
    sizes = sorted({(one.items, one.seeds) for one in found.values()})
    on = " or ".join(f"{items:,} items at {format_count(seeds, 'seed')}" for items, seeds in sizes)
    return Table(name, f"{title}, against the baseline on {on}.", columns, tuple(rows))
