"""First weights that were not drawn: where they came from, and what became of each."""

from collections.abc import Mapping
from typing import Any

from kvlab.humanize import format_count
from kvlab.report.document import Block, Column, Content, Row, Section, Table, cell, paragraph
from kvlab.report.study import Study
from kvlab.report.trial_rows import Levels

Facts = Mapping[str, Any]

_COLUMNS = ("copied", "pooled", "averaged", "fresh", "unused")


def report_starting_weights(study: Study) -> Section | None:
    found = {levels: facts for levels in study.cells if (facts := _facts(study, levels))}
    if not found:
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
    rows = tuple(_row(study, levels, facts) for levels, facts in found.items())
    caption = "Parameters by what became of them; the lowest seed of each cell."
    contents: list[Content] = [paragraph(text), Table("starts", caption, columns, rows)]
    listed = {_misfits(facts): study.label(levels) for levels, facts in reversed(found.items())}
    for lines, name in reversed(listed.items()):
        if lines:
            title = f"{format_count(len(lines), 'parameter')} that did not fit, as in {name}"
            contents.append(Block(title, "\n".join(lines)))
    return Section("Starting weights", tuple(contents))


def _facts(study: Study, levels: Levels) -> Facts | None:
    """Of the first seed that is done."""
    for row in study.cells[levels].values():
        if row.is_done:
            start: Facts | None = row.record["training_record"].get("start")
            return start
    return None


def _row(study: Study, levels: Levels, facts: Facts) -> Row:
    counts = (cell(f"{len(facts[name]):,}", len(facts[name])) for name in _COLUMNS)
    return Row((cell(study.label(levels)), cell(facts["source"]), *counts), study.cell_key(levels))


def _misfits(facts: Facts) -> tuple[str, ...]:
    own = (f"{name}: own first values, {reason}" for name, reason in facts["fresh"].items())
    return (*own, *(f"{name}: of the source, left over" for name in facts["unused"]))
