"""From which context and which batch on a cell's layout pays against the baseline's."""

from typing import Any

from kvlab.layout.roofline import FURTHEST, Ceilings, break_even
from kvlab.report.benchmark_lines import cell_experiment, measured_ceilings
from kvlab.report.section import Cell, Column, Row, Table, cell
from kvlab.report.study import Study
from kvlab.spec.experiment import Experiment

CAPTION = (
    "Where a layout starts to pay by the roofline: from here on a step takes at most nine tenths"
    " of the baseline's. Never: not up to 2^20."
)


def break_even_table(
    study: Study, lines: list[dict[str, Any]], keys: dict[str, str]
) -> Table | None:
    """A row a cell that has lines; None where there is nothing beside the baseline.

    Args:
        lines, keys: of `kvlab.report.benchmark_lines.benchmark_lines`.
    """
    ceilings, base = measured_ceilings(lines), cell_experiment(study, study.baseline)
    if ceilings is None or base is None:
        return None
    rows = []
    for levels in study.cells:
        mine = cell_experiment(study, levels)
        if levels != study.baseline and study.key(levels) in keys.values() and mine is not None:
            cells = (cell(study.label(levels)), *_cells(mine, base, ceilings))
            rows.append(Row(cells, study.key(levels)))
    heads = ("context at batch 1 (tokens)", "batch at the block size (sequences)")
    columns = (Column("cell"), *(Column(head, True, csv=(head,)) for head in heads))
    return Table("break-even", CAPTION, columns, tuple(rows)) if rows else None


def _cells(mine: Experiment, base: Experiment, ceilings: Ceilings) -> tuple[Cell, Cell]:
    pair = (mine.model, mine.serving), (base.model, base.serving)
    context = break_even(*pair, ceilings, batch_size=1)
    batch = break_even(*pair, ceilings, context_length=mine.model.block_size)
    return _cell(context), _cell(batch)


def _cell(value: int | None) -> Cell:
    if value is None:
        return cell("never", FURTHEST + 1, csv=(None,))  # sorts last
    return cell(f"{value:,}", value)
