"""The serving gap: what the serving cache changes that one-shot scoring cannot see."""

from kvlab.report.numbers import PLUS_MINUS, counted, difference, shown
from kvlab.report.rows import Levels
from kvlab.report.section import (
    EMPTY,
    Cell,
    Column,
    Content,
    Row,
    Section,
    Span,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.study import Study

ROUNDING = 1e-4
"""Nats per token: a gap below it is the rounding of float32, not the cache."""


def serving_gap(study: Study) -> Section | None:
    gaps = study.means("serving_gap")
    if not gaps:
        return None
    real = [levels for levels in gaps if abs(gaps[levels]) >= ROUNDING]
    text = (
        "Each trial's weights are scored twice on the same text: in one shot, and token by token"
        " through the very cache that would serve. The gap is the second loss minus the first, so"
        " it is paired by weights and needs no other trial. "
    )
    spans: list[Span] = [text]
    if real:
        worst = max(real, key=lambda levels: gaps[levels])
        spans.append(f"{counted(len(real), 'cell')} of {len(gaps)} have one; the largest is ")
        spans += [Strong(study.label(worst)), f" at {difference('serving_gap', gaps[worst])}."]
    else:
        spans.append(f"No cell of {len(gaps)} has one beyond rounding ({ROUNDING:g} nats/token).")
    contents: list[Content] = [paragraph(*spans), *_texts(study)]
    if real:
        contents.append(_table(study, real, len(gaps) - len(real)))
    return Section("Serving gap", tuple(contents))


def _texts(study: Study) -> list[Content]:
    """A note where the two losses are not over the same text."""
    scored = {
        (row.measurements["loss_tokens"], row.measurements["served_tokens"])
        for row in study.done
        if "loss_tokens" in row.measurements and "served_tokens" in row.measurements
    }
    if all(one_shot == served for one_shot, served in scored):
        return []
    listed = "; ".join(f"{one:,.0f} and {served:,.0f}" for one, served in sorted(scored))
    text = (
        f"The one-shot loss is over more text than the served loss ({listed} tokens), so the two"
        " columns do not subtract to the gap: that compares both on the served text alone."
    )
    return [paragraph(text)]


def _table(study: Study, real: list[Levels], quiet: int) -> Table:
    columns = (
        Column("cell"),
        Column("n", True),
        Column("one-shot loss", True),
        Column("served loss", True),
        Column("gap (nats/token)", True),
        Column("smallest and largest", True, "over seeds"),
    )
    left_out = f"; the other {counted(quiet, 'cell')} have none beyond rounding" if quiet else ""
    caption = f"Cells whose serving cache changes the loss{left_out}."
    return Table("serving-gap", caption, columns, tuple(_row(study, levels) for levels in real))


def _row(study: Study, levels: Levels) -> Row:
    values = list(study.values(levels, "serving_gap").values())
    mean = sum(values) / len(values)
    text = difference("serving_gap", mean)
    if len(values) > 1:
        spread = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
        text += f" {PLUS_MINUS} {shown('serving_gap', spread)}"
    ends = [difference("serving_gap", value) for value in (min(values), max(values))]
    extent = cell(" to ".join(ends), max(values)) if len(values) > 1 else EMPTY
    losses = (_mean(study, levels, "loss"), _mean(study, levels, "loss_served"))
    count = cell(str(len(values)), len(values))
    name = cell(study.label(levels))
    return Row((name, count, *losses, cell(text, mean), extent), study.key(levels))


def _mean(study: Study, levels: Levels, metric: str) -> Cell:
    mean = study.mean(levels, metric)
    return EMPTY if mean is None else cell(shown(metric, mean), mean)
