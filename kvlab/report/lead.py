"""The first sentences of a report: the smallest caches that are shown to be cheap, or not to cost.

Three things are said of the cells that store less than their reference: which is the smallest that
is shown to cost less than the margin, which is the smallest that is not shown to cost more, and
which levels are shown to cost. What saves no byte has a sentence of its own.
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
    first = _judge_smaller(study, compared) if compared else _count_verdicts(study)
    rest = (*_describe_costs(study), *_describe_free_levels(study))
    return [Paragraph(tuple(first), tone="lead"), *([Paragraph(rest)] if rest else [])]


def _judge_smaller(study: Study, rows: list[AblationRow]) -> list[Span]:
    """Name the smallest cache that is shown to be cheap, and the smallest not shown to cost."""
    margin, unit = study.decide.margin, difference_unit(study.primary_metric)
    tested = [row for row in rows if row.interval is not None or row.verdict_name == "identical"]
    if not tested:
        front = {point.levels for point in memory_front(study) if point.is_on_front}
        best = min(rows, key=lambda row: (row.levels not in front, -(row.kv_factor or 0.0)))
        why = "one seed does not tell it from noise" if len(study.seeds) == 1 else "not tested"
        return [*_name_cell(study, best), f", at {_difference(study, best)}; {why}."]
    limit = f"{margin:g} {unit}" if margin is not None else "nothing"
    what = f"shown to cost less than {limit}" if margin is not None else "shown to cost nothing"
    cheap = [row for row in tested if row.verdict_name in CHEAP]
    spared = [row for row in tested if row.verdict_name not in WORSE]
    spans: list[Span] = []
    if cheap:
        best = _smallest(cheap)
        spans += ["The smallest cache that is ", what, " is that of "]
        spans += [*_name_cell(study, best, " It stores"), f", {_state_cost(study, best)}."]
    elif spared:
        spans.append(f"No smaller cache is {what}.")
    else:
        best = min(tested, key=lambda row: _worst_cost(study, row))
        spans += ["Every smaller cache that was tested is shown to cost. The cheapest is that of "]
        return [*spans, *_name_cell(study, best, " It stores"), f", at {_difference(study, best)}."]
    if spared:
        open_one = _smallest(spared)
        if not cheap or open_one.levels != best.levels:
            spans += [" The smallest that is not shown to cost more is that of "]
            spans += [*_name_cell(study, open_one, " It stores")]
            spans += [f", at {_difference(study, open_one)}: {open_one.found.verdict}."]  # type: ignore[union-attr]
    return spans


def _smallest(rows: list[AblationRow]) -> AblationRow:
    return max(rows, key=lambda row: row.kv_factor or 0.0)


def _name_cell(study: Study, row: AblationRow, stores: str = " stores") -> list[Span]:
    """Name a cell, how much less it stores than its reference, and unequal training tokens."""
    reference = study.label(study.estimand.reference(row.levels))
    of = "the baseline" if reference == study.label(study.baseline) else reference
    text = f"{stores} {format_ratio(row.kv_factor or 1.0)} less K/V than {of}"
    dot = "." if stores.startswith(" It") else ""
    factor = row.found.token_factor if row.found is not None else None
    if factor is not None and factor != 1.0:
        more = "more" if factor > 1 else "less"
        text += f" and was trained on {format_percent(abs(factor - 1))} {more} tokens"
    return [Strong(study.label(row.levels)), f"{dot}{text}"]


def _state_cost(study: Study, row: AblationRow) -> str:
    """Return what a cheap cell costs, and the worse end of its interval."""
    if row.verdict_name == "identical":
        return "and loses nothing at any seed"
    metric = study.primary_metric
    value = f"{format_difference(metric, row.difference or 0.0)} {difference_unit(metric)}".strip()
    worst = format_difference(metric, _signed_worst(study, row))
    shown = "is shown to cost, too: " if row.verdict_name == "worse within" else "costs "
    if row.verdict_name == "better":
        return f"and is better: {value}, at most {worst}"
    return f"and {shown}{value}, at most {worst}"


def _difference(study: Study, row: AblationRow) -> str:
    """Return a difference with its unit and interval."""
    metric = study.primary_metric
    text = f"{format_difference(metric, row.difference or 0.0)} {difference_unit(metric)}".strip()
    if row.interval is None:
        return text
    low, high = (format_difference(metric, end) for end in row.interval)
    return f"{text} ({100 * (1 - study.decide.alpha):g}% interval {low} to {high})"


def _signed_worst(study: Study, row: AblationRow) -> float:
    """Return the worse end of a cell's interval, as a difference."""
    assert row.interval is not None, "only tested cells have a worst cost"
    return row.interval[0] if METRICS[study.primary_metric].better == "higher" else row.interval[1]


def _worst_cost(study: Study, row: AblationRow) -> float:
    sign = -1.0 if METRICS[study.primary_metric].better == "higher" else 1.0
    return sign * _signed_worst(study, row) if row.interval is not None else 0.0


def _count_verdicts(study: Study) -> list[Span]:
    """Count the verdicts on the levels, where no cell stores less than its reference."""
    counts: dict[str, int] = {}
    for effect in study.effects(study.primary_metric):
        counts[effect.verdict] = counts.get(effect.verdict, 0) + 1
    listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    text = "No cell stores less K/V than its reference"
    return [f"{text}; of the levels: {listed}." if listed else f"{text}."]


def _describe_costs(study: Study) -> list[Span]:
    """Name the levels that are shown to cost, the largest first."""
    worse = [e for e in study.effects(study.primary_metric) if e.verdict_name in WORSE]
    worse.sort(key=lambda effect: -abs(effect.value))
    if not worse:
        return []
    spans: list[Span] = ["Shown to cost: "]
    for number, effect in enumerate(worse[:MAX_NAMED]):
        within = (
            f" and less than {effect.margin:g}" if effect.verdict_name == "worse within" else ""
        )
        value = format_difference(effect.metric, effect.value)
        spans += ["; " if number else "", Strong(effect.name), f" {value}{within}"]
    more = len(worse) - MAX_NAMED
    return [*spans, f"; and {more} more." if more > 0 else ". "]


def _describe_free_levels(study: Study) -> list[Span]:
    """Say what factors do that save no byte: their cells are references of others."""
    free = study.estimand.free_levels
    spans: list[Span] = []
    for effect in study.effects(study.primary_metric):
        factor, _ = effect.change[0]
        is_free = all((factor, level) in free for level in study.factors[factor][1:])
        if is_free and effect.is_significant and len(study.estimand.references) > 1:
            spans += ["; " if spans else "Without saving a byte: ", *_state_effect(effect)]
    return [*spans, "."] if spans else []


def _state_effect(effect: Effect) -> list[Span]:
    value = format_difference(effect.metric, effect.value)
    return [Strong(effect.name), f" {value} ({effect.verdict})"]
