"""The first sentences of a report: the smallest caches that are shown to be cheap, or not to cost.

Three things are said of the cells that store less than their reference: which is the smallest that
is clearly shown to cost less than the margin, which smaller ones are not clearly shown to cost
more, and which levels are clearly shown to cost. What saves no byte has a sentence of its own.

The sentences are to stand when every loss moves a little, so they keep a distance from thresholds.
A cell whose upper end is close to the margin is not clearly below it, on whichever side it is. Its
interval is listed among those of the smallest caches. Cells are listed by size and levels in the
order of the design, which do not move. Words of verdicts stand in the tables.
"""

from kvlab.analysis.cell_comparisons import CellComparison
from kvlab.analysis.effects import Effect
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import CHEAP, WORSE
from kvlab.report import formatting as fmt
from kvlab.report.document import Paragraph, Span, Strong
from kvlab.report.pareto_front import memory_front
from kvlab.report.table_columns import size_factor
from kvlab.store.metrics import METRICS

MAX_NAMED = 3
"""Levels that the sentences name; the list of levels has all."""

FROM_MARGIN, FROM_ZERO = 0.1, 0.1
"""Distances from which on an end is clearly below the margin, in margins, or above zero, in half
widths of the interval."""


def write_lead(study: Study) -> list[Paragraph]:
    """Return the first sentences."""
    if study.is_untrained:
        best = max(study.cells, key=lambda levels: size_factor(study, levels) or 0.0)
        if (size_factor(study, best) or 0.0) > 1:
            spans = (*_name_cell(study, best), ". No weights were trained, so no cost is known.")
            return [Paragraph(spans, tone="lead")]
    if not study.values(study.baseline, study.primary_metric):
        text = "The baseline has no finished trial yet: no cost is known."
        return [Paragraph((text,), tone="lead")]
    smaller = [one for one in study.comparisons.values() if (one.size_factor or 0.0) > 1]
    first = _judge_smaller(study, smaller) if smaller else _list_levels(study)
    rest = (*_describe_costs(study), *(_describe_free_levels(study) if smaller else ()))
    return [Paragraph(tuple(first), tone="lead"), *([Paragraph(rest)] if rest else [])]


def _judge_smaller(study: Study, smaller: list[CellComparison]) -> list[Span]:
    """Name the smallest cache that is clearly cheap, and smaller ones not shown to cost."""
    margin, metric = study.decide.margin, study.primary_metric
    unit = fmt.difference_unit(metric)
    tested = [one for one in smaller if one.has_interval or one.verdict_name == "identical"]
    if not tested:
        front = {point.levels for point in memory_front(study) if point.is_on_front}
        best = min(smaller, key=lambda one: (one.levels not in front, -_factor(one)))
        why = "one seed does not tell it from noise" if len(study.seeds) == 1 else "not tested"
        return [*_name_cell(study, best.levels), f", at {_difference(study, best)}; {why}."]
    what = f"shown to cost {'nothing' if margin is None else f'less than {margin:g} {unit}'}"
    limit = (1 - FROM_MARGIN) * (margin or 0.0)
    cheap = [c for c in tested if c.verdict_name in CHEAP and _costs(study, c)[1] <= limit]
    spared = [one for one in tested if not _is_clearly_worse(study, one)]
    if not cheap and not spared:
        best = min(tested, key=lambda one: _costs(study, one)[1])
        name = _name_cell(study, best.levels, ". It stores")
        shown = "Every smaller cache that was tested is clearly shown to cost."
        return [f"{shown} The cheapest is that of ", *name, f", at {_difference(study, best)}."]
    spans: list[Span] = [f"No smaller cache is clearly {what}."]
    if cheap:
        best = max(cheap, key=_factor)
        spans = [f"The smallest cache that is clearly {what} is that of "]
        spans += _name_cell(study, best.levels, ". It stores")
        if best.verdict_name == "identical":
            spans.append(", and loses nothing at any seed.")
        else:
            value = f"{fmt.format_difference(metric, best.value)} {unit}".strip()
            worst = best.low if METRICS[metric].better == "higher" else best.high
            costs = "is shown to cost, too:" if _is_clearly_worse(study, best) else "costs"
            spans.append(f", and {costs} {value}, at most {fmt.format_difference(metric, worst)}.")
        if best in spared:
            spared = [one for one in spared if _factor(one) > _factor(best)]
    spared.sort(key=_factor, reverse=True)
    for number, one in enumerate(spared[:MAX_NAMED]):
        than = "" if one.reference == study.baseline else f" less than {study.label(one.reference)}"
        trained = f" {_compare_tokens(one)}".rstrip()
        spans += ["; " if number else " Not clearly shown to cost more, the smallest first: "]
        spans += [Strong(study.label(one.levels)), f" {fmt.format_ratio(_factor(one))}{than}"]
        spans += [f"{trained} at {_difference(study, one, is_short=number > 0)}"]
    return [*spans, _count_more(len(spared))] if spared else spans


def _count_more(count: int) -> str:
    return f"; and {count - MAX_NAMED} more." if count > MAX_NAMED else "."


def _factor(one: CellComparison) -> float:
    return one.size_factor or 0.0


def _name_cell(study: Study, levels: Levels, stores: str = " stores") -> list[Span]:
    """Name a cell, how much less it stores than its reference, and unequal training tokens."""
    reference, found = study.estimand.reference(levels), study.comparisons.get(levels)
    of = "the baseline" if reference == study.baseline else study.label(reference)
    text = f"{stores} {fmt.format_ratio(size_factor(study, levels) or 1.0)} less K/V than {of}"
    trained = _compare_tokens(found) if found is not None else ""
    return [Strong(study.label(levels)), text + (f" and was {trained}" if trained else "")]


def _compare_tokens(one: CellComparison) -> str:
    """Say how many more tokens a cell was trained on than its reference; empty if equal."""
    if one.token_factor is None or one.token_factor == 1.0:
        return ""
    change = one.token_factor - 1
    return f"trained on {fmt.format_percent(abs(change))} {'more' if change > 0 else 'less'} tokens"


def _difference(study: Study, one: CellComparison, *, is_short: bool = False) -> str:
    """Return a difference with its interval, and if not short with what they are."""
    metric = study.primary_metric
    unit = "" if is_short else fmt.difference_unit(metric)
    text = f"{fmt.format_difference(metric, one.value)} {unit}".strip()
    if not one.has_interval:
        return text
    kind = "" if is_short else f"{100 * (1 - study.decide.alpha):g}% interval "
    return f"{text} ({kind}{fmt.format_interval(metric, one.low, one.high)})"


def _costs(study: Study, one: CellComparison | Effect) -> tuple[float, float]:
    """Return the least and the most that is lost: the ends of an interval, as losses."""
    has_ends = isinstance(one, Effect) or one.has_interval  # exact ones have equal ends
    low, high = (one.low, one.high) if has_ends else (0.0, 0.0)
    return (-high, -low) if METRICS[study.primary_metric].better == "higher" else (low, high)


def _is_clearly_worse(study: Study, one: CellComparison | Effect) -> bool:
    """Return whether a cost is shown, and would be if the interval were a little wider."""
    least, most = _costs(study, one)
    return one.verdict_name in WORSE and least > FROM_ZERO * (most - least) / 2


def _list_levels(study: Study) -> list[Span]:
    """Name the levels with their intervals, where no cell stores less than its reference."""
    spans: list[Span] = ["No cell stores less K/V than its reference"]
    for number, one in enumerate(study.effects(study.primary_metric)[:MAX_NAMED]):
        text = f" {fmt.format_difference(one.metric, one.value)}"
        if one.has_interval:
            text += f" ({fmt.format_interval(one.metric, one.low, one.high)})"
        spans += ["; " if number else ": ", Strong(one.name), text]
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
        value = fmt.format_difference(effect.metric, effect.value)
        if effect.at and study.estimand.changes_serving_alone(effect.change):
            same = [one for one in effects if one.claim == effect.claim]
            shown = [one for one in worse if one.claim == effect.claim]
            largest = max(shown, key=lambda one: abs(one.value))
            value = f"up to {fmt.format_difference(effect.metric, largest.value)}"
            found[effect.claim] = f"{value} in {len(shown)} of {len(same)} settings"
        else:
            found[effect.name] = value
    spans: list[Span] = []
    for number, (name, value) in enumerate(list(found.items())[:MAX_NAMED]):
        spans += ["; " if number else "Clearly shown to cost: ", Strong(name), f" {value}"]
    return [*spans, f"{_count_more(len(found))} "] if found else []


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
        value = fmt.format_difference(effect.metric, effect.value)
        spans += ["; " if spans else "Without saving a byte: "]
        spans += [Strong(effect.name), f" {value} ({effect.verdict})"]
    return [*spans, "."] if spans else []
