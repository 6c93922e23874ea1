"""The first sentences of a report: the smallest caches that are shown to be cheap, or not to cost.

Three things are said of the cells that store less than their reference: which is the smallest that
is clearly shown to cost less than the margin, which smaller ones are not clearly shown to cost
more, and which levels are clearly shown to cost. What saves no byte has a sentence of its own.

The sentences are to stand when every loss moves a little, so they keep a distance from thresholds.
A cell whose upper end is close to the margin is not clearly below it, on whichever side it is. Its
interval is listed among those of the smallest caches. Cells are listed by size and levels in the
order of the design, which do not move. Words of verdicts stand in the tables.
"""

from kvlab.analysis.effects import Effect
from kvlab.analysis.study import Study
from kvlab.analysis.verdicts import CHEAP, WORSE
from kvlab.report.ablation import AblationRow, list_ablation
from kvlab.report.document import Paragraph, Span, Strong
from kvlab.report.formatting import (
    difference_unit,
    format_difference,
    format_percent,
    format_ratio,
)
from kvlab.report.pareto_front import memory_front
from kvlab.store.metrics import METRICS

MAX_NAMED = 3
"""Levels that the sentences name; the list of levels has all."""

FROM_MARGIN, FROM_ZERO = 0.1, 0.1
"""Distances from which on an end is clearly below the margin, in margins, or above zero, in half
widths of the interval."""


def write_lead(study: Study) -> list[Paragraph]:
    """Return the first sentences."""
    rows = list_ablation(study, len(study.cells))
    smaller = [row for row in rows if row.kv_factor is not None and row.kv_factor > 1]
    if study.is_untrained and smaller:
        best = max(smaller, key=lambda row: row.kv_factor or 0.0)
        spans = (*_name_cell(study, best), ". No weights were trained, so no cost is known.")
        return [Paragraph(spans, tone="lead")]
    if not study.values(study.baseline, study.primary_metric):
        text = "The baseline has no finished trial yet: no cost is known."
        return [Paragraph((text,), tone="lead")]
    compared = [row for row in smaller if row.found is not None]
    first = _judge_smaller(study, compared) if compared else _list_levels(study)
    rest = (*_describe_costs(study), *(_describe_free_levels(study) if compared else ()))
    return [Paragraph(tuple(first), tone="lead"), *([Paragraph(rest)] if rest else [])]


def _judge_smaller(study: Study, rows: list[AblationRow]) -> list[Span]:
    """Name the smallest cache that is clearly cheap, and smaller ones not shown to cost."""
    margin, unit = study.decide.margin, difference_unit(study.primary_metric)
    tested = [row for row in rows if row.interval is not None or row.verdict_name == "identical"]
    if not tested:
        front = {point.levels for point in memory_front(study) if point.is_on_front}
        best = min(rows, key=lambda row: (row.levels not in front, -(row.kv_factor or 0.0)))
        why = "one seed does not tell it from noise" if len(study.seeds) == 1 else "not tested"
        return [*_name_cell(study, best), f", at {_difference(study, best)}; {why}."]
    what = f"shown to cost {'nothing' if margin is None else f'less than {margin:g} {unit}'}"
    limit = (1 - FROM_MARGIN) * (margin or 0.0)
    cheap = [r for r in tested if r.verdict_name in CHEAP and _costs(study, r)[1] <= limit]
    spared = [row for row in tested if not _is_clearly_worse(study, row)]
    spans: list[Span] = [f"No smaller cache is clearly {what}."]
    if cheap:
        best = max(cheap, key=_size_factor)
        spans = [f"The smallest cache that is clearly {what} is that of "]
        spans += [*_name_cell(study, best, " It stores"), f", {_state_cost(study, best)}."]
        if best in spared:
            spared = [row for row in spared if _size_factor(row) > _size_factor(best)]
    elif not spared:
        best = min(tested, key=lambda row: _costs(study, row)[1])
        shown = "Every smaller cache that was tested is clearly shown to cost."
        spans = [f"{shown} The cheapest is that of "]
        return [*spans, *_name_cell(study, best, " It stores"), f", at {_difference(study, best)}."]
    return [*spans, *_list_spared(study, sorted(spared, key=_size_factor, reverse=True))]


def _list_spared(study: Study, rows: list[AblationRow]) -> list[Span]:
    """List cells that are not shown to cost, with their sizes and intervals."""
    spans: list[Span] = []
    for number, row in enumerate(rows[:MAX_NAMED]):
        reference = study.estimand.reference(row.levels)
        than = "" if reference == study.baseline else f" less than {study.label(reference)}"
        trained = f" {_compare_tokens(row)}".rstrip()
        spans += ["; " if number else " Not clearly shown to cost more, the smallest first: "]
        spans += [Strong(study.label(row.levels)), f" {format_ratio(_size_factor(row))}{than}"]
        spans += [f"{trained} at {_difference(study, row, is_short=number > 0)}"]
    more = len(rows) - MAX_NAMED
    return [*spans, f"; and {more} more." if more > 0 else "."] if rows else []


def _size_factor(row: AblationRow) -> float:
    return row.kv_factor or 0.0


def _name_cell(study: Study, row: AblationRow, stores: str = " stores") -> list[Span]:
    """Name a cell, how much less it stores than its reference, and unequal training tokens."""
    reference = study.label(study.estimand.reference(row.levels))
    of = "the baseline" if reference == study.label(study.baseline) else reference
    text = f"{stores} {format_ratio(row.kv_factor or 1.0)} less K/V than {of}"
    dot = "." if stores.startswith(" It") else ""
    trained = _compare_tokens(row)
    text += f" and was {trained}" if trained else ""
    return [Strong(study.label(row.levels)), f"{dot}{text}"]


def _compare_tokens(row: AblationRow) -> str:
    """Say how many more tokens a cell was trained on than its reference; empty if equal."""
    factor = row.found.token_factor if row.found is not None else None
    if factor is None or factor == 1.0:
        return ""
    return f"trained on {format_percent(abs(factor - 1))} {'more' if factor > 1 else 'less'} tokens"


def _state_cost(study: Study, row: AblationRow) -> str:
    """Return what a cheap cell costs, and the worse end of its interval."""
    if row.verdict_name == "identical":
        return "and loses nothing at any seed"
    metric = study.primary_metric
    value = f"{format_difference(metric, row.difference or 0.0)} {difference_unit(metric)}".strip()
    sign = -1.0 if METRICS[metric].better == "higher" else 1.0
    worst = format_difference(metric, sign * _costs(study, row)[1])
    shown = "is shown to cost, too: " if _is_clearly_worse(study, row) else "costs "
    return f"and {shown}{value}, at most {worst}"


def _difference(study: Study, row: AblationRow, *, is_short: bool = False) -> str:
    """Return a difference with its interval, and if not short with what they are."""
    metric = study.primary_metric
    unit = "" if is_short else difference_unit(metric)
    text = f"{format_difference(metric, row.difference or 0.0)} {unit}".strip()
    if row.interval is None:
        return text
    low, high = (format_difference(metric, end) for end in row.interval)
    kind = "" if is_short else f"{100 * (1 - study.decide.alpha):g}% interval "
    return f"{text} ({kind}{low} to {high})"


def _costs(study: Study, one: AblationRow | Effect) -> tuple[float, float]:
    """Return the least and the most that is lost: the ends of an interval, as losses."""
    interval = (one.low, one.high) if isinstance(one, Effect) else one.interval
    low, high = interval or (0.0, 0.0)
    return (-high, -low) if METRICS[study.primary_metric].better == "higher" else (low, high)


def _is_clearly_worse(study: Study, one: AblationRow | Effect) -> bool:
    """Return whether a cost is shown, and would be if the interval were a little wider."""
    least, most = _costs(study, one)
    return one.verdict_name in WORSE and least > FROM_ZERO * (most - least) / 2


def _list_levels(study: Study) -> list[Span]:
    """Name the levels with their intervals, where no cell stores less than its reference."""
    spans: list[Span] = ["No cell stores less K/V than its reference"]
    for number, effect in enumerate(study.effects(study.primary_metric)[:MAX_NAMED]):
        value = format_difference(effect.metric, effect.value)
        ends = ""
        if effect.has_interval:
            low, high = (format_difference(effect.metric, end) for end in (effect.low, effect.high))
            ends = f" ({low} to {high})"
        spans += ["; " if number else ": ", Strong(effect.name), f" {value}{ends}"]
    return [*spans, "."]


def _describe_costs(study: Study) -> list[Span]:
    """Name the levels that are clearly shown to cost, in the order of the design.

    A level of serving is judged in every setting apart: its largest cost is named.
    """
    free = {effect.name for effect in _list_free_effects(study)}
    effects = [one for one in study.effects(study.primary_metric) if one.name not in free]
    worse = [effect for effect in effects if _is_clearly_worse(study, effect)]
    found: dict[str, str] = {}
    for effect in worse:
        value = format_difference(effect.metric, effect.value)
        if effect.at and study.estimand.changes_serving_alone(effect.change):
            same = [one for one in effects if one.claim == effect.claim]
            shown = [one for one in worse if one.claim == effect.claim]
            largest = max(shown, key=lambda one: abs(one.value))
            value = f"up to {format_difference(effect.metric, largest.value)}"
            found[effect.claim] = f"{value} in {len(shown)} of {len(same)} settings"
        else:
            found[effect.name] = value
    spans: list[Span] = []
    for number, (name, value) in enumerate(list(found.items())[:MAX_NAMED]):
        spans += ["; " if number else "Clearly shown to cost: ", Strong(name), f" {value}"]
    more = len(found) - MAX_NAMED
    return [*spans, f"; and {more} more. " if more > 0 else ". "] if found else []


def _list_free_effects(study: Study) -> list[Effect]:
    """Return what factors do that save no byte, where it is more than the margin."""
    free, margin = study.estimand.free_levels, study.decide.margin or 0.0
    if len(study.estimand.references) < 2:
        return []
    return [
        effect
        for effect in study.effects(study.primary_metric)
        if all((effect.change[0][0], one) in free for one in study.factors[effect.change[0][0]][1:])
        and effect.is_significant
        and abs(effect.value) >= margin
    ]


def _describe_free_levels(study: Study) -> list[Span]:
    """Say what factors do that save no byte: their cells are references of others."""
    spans: list[Span] = []
    for effect in _list_free_effects(study):
        value = format_difference(effect.metric, effect.value)
        spans += ["; " if spans else "Without saving a byte: "]
        spans += [Strong(effect.name), f" {value} ({effect.verdict})"]
    return [*spans, "."] if spans else []
