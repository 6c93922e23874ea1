"""Interval widths: what would narrow the intervals of the effects most."""

from kvlab.analysis.precision import Precision, estimate_precision, measure_final_fall
from kvlab.analysis.study import Study
from kvlab.humanize import format_count
from kvlab.report.document import Cell, Column, Content, Row, Section, Table, cell, paragraph
from kvlab.report.formatting import difference_unit, format_magnitude, in_display_unit

LAST_SHARE = 0.1
"""Part of the training whose fall in loss is quoted."""


def report_interval_widths(study: Study) -> Section | None:
    """Compare the errors over seeds and over texts; None without losses by document."""
    metric = study.primary_metric
    found = [estimate_precision(study, effect) for effect in study.effects(metric)]
    measured = [one for one in found if one is not None]
    if not measured:
        return None
    unit = difference_unit(metric)
    columns = (
        Column("level"),
        Column(f"error over seeds ({unit})", True, "another training on the same text"),
        Column(f"error over texts ({unit})", True, "the same weights on another text of this size"),
        Column(f"half interval ({unit})", True, "half the width of the simultaneous interval"),
        Column(f"twice the seeds ({unit})", True, "what it would be"),
        Column(f"twice the scored tokens ({unit})", True, "what it would be"),
        Column("helps most"),
    )
    rows = tuple(_row(study, one) for one in measured)
    table = Table("interval-widths", "What would narrow the intervals.", columns, rows)
    return Section(
        "What would narrow the intervals",
        (paragraph(_describe(measured)), *_steps(study), table),
        is_appendix=True,
    )


def _describe(measured: list[Precision]) -> str:
    needs_text = [one.effect.name for one in measured if one.helps_most == "scored tokens"]
    text = (
        "The intervals of the effects are over seeds: they cover other trainings on the same scored"
        " text. More seeds narrow them. More scored tokens narrow them where the seeds differ from"
        " document to document. The intervals do not contain the error over texts, which is"
        " clustered by document: it says how well the differences hold for other text."
    )
    if not needs_text:
        return f"{text} Seeds help most for every level here."
    if len(needs_text) == len(measured):
        return f"{text} Scored tokens help most for every level here."
    named = ", ".join(needs_text)
    others = format_count(len(measured) - len(needs_text), "level")
    return f"{text} Scored tokens help most for {named}; seeds for the other {others}."


def _steps(study: Study) -> list[Content]:
    """Say whether the loss still falls steeply, where the curves tell."""
    fall = measure_final_fall(study, LAST_SHARE)
    reaches = [e.high - e.low for e in study.effects(study.primary_metric) if e.has_interval]
    if fall is None or not reaches or fall <= min(reaches) / 2:
        return []
    text = (
        f"Over the last {LAST_SHARE:.0%} of its tokens the baseline's validation loss still fell by"
        f" {format_magnitude('loss', fall)} nats/token, more than half of the narrowest interval:"
        " more steps may change the differences, and may narrow intervals where levels learn at"
        " different speeds."
    )
    return [paragraph(text)]


def _row(study: Study, one: Precision) -> Row:
    metric = one.effect.metric
    numbers = (
        one.seed_error,
        one.text_error,
        one.reach,
        one.reach_with_seeds,
        one.reach_with_tokens,
    )
    cells = (Cell(format_magnitude(metric, n), in_display_unit(metric, n)) for n in numbers)
    key = study.change_key(one.effect.change)
    return Row((cell(one.effect.name), *cells, cell(one.helps_most)), key)
