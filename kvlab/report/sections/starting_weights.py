"""Starting weights (``training.init_from``): their source, and how each parameter was made."""

from collections.abc import Mapping
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.document import Block, Column, Content, Row, Section, Table, cell, paragraph

Start = Mapping[str, Any]

_COLUMNS = ("copied", "pooled", "averaged", "fresh", "unused")


def report_starting_weights(study: Study) -> Section | None:
    """List the cells that do not start from randomly initialized weights."""
    starts = {levels: start for levels in study.cells if (start := _initial_weights(study, levels))}
    if not starts:
        return None
    text = (
        "These cells do not start from freshly drawn weights. K/V heads are mean-pooled into"
        " fewer, an owner's projections averaged over the layers that share them; what fits is"
        " copied, and what does not keeps its own first values. Tokens that the source was trained"
        " on count beside the cell's own: a cell that starts fresh has seen fewer."
    )
    columns = (
        Column("cell"),
        Column("starts from"),
        Column("copied", True),
        Column("pooled", True),
        Column("averaged", True),
        Column("own first values", True),
        Column("left over", True, "of the source"),
    )
    rows = tuple(_row(study, levels, start) for levels, start in starts.items())
    caption = "Parameters by what became of them; the lowest seed of each cell."
    contents: list[Content] = [paragraph(text), Table("starts", caption, columns, rows)]
    examples = {
        _unmatched_parameters(start): study.label(levels)
        for levels, start in reversed(starts.items())
    }
    for lines, name in reversed(examples.items()):
        if lines:
            title = f"{format_count(len(lines), 'parameter')} that did not fit, as in {name}"
            contents.append(Block(title, "\n".join(lines)))
    return Section("Starting weights", tuple(contents), is_appendix=True)


def _initial_weights(study: Study, levels: Levels) -> Start | None:
    """Return the record of the first seed that is done."""
    for row in study.cells[levels].values():
        if row.is_done:
            start: Start | None = row.record["training_record"].get("start")
            return start
    return None


def _row(study: Study, levels: Levels, start: Start) -> Row:
    counts = (cell(f"{len(start[name]):,}", len(start[name])) for name in _COLUMNS)
    return Row((cell(study.label(levels)), cell(start["source"]), *counts), study.cell_key(levels))


def _unmatched_parameters(start: Start) -> tuple[str, ...]:
    own = (f"{name}: own first values, {reason}" for name, reason in start["fresh"].items())
    return (*own, *(f"{name}: of the source, left over" for name in start["unused"]))
