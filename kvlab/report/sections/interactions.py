"""Two-way interactions: whether two reductions together cost the sum of what each costs alone."""

from kvlab.report.alias_column import with_aliases
from kvlab.report.effects import Effect
from kvlab.report.numbers import TIMES, counted, difference, difference_unit, p_value, shown
from kvlab.report.section import EMPTY, Column, Row, Section, Table, cell, paragraph
from kvlab.report.study import Study
from kvlab.trial.metrics import METRICS

MOST = 60
"""Interactions shown; the strongest first where there are more."""


def interactions(study: Study) -> Section | None:
    metric = study.primary
    found = [effect for effect in study.interactions(metric) if effect.estimate]
    if not found:
        return None
    unit = difference_unit(metric)
    note = paragraph(
        "Additive means that two levels together change the"
        f" {METRICS[metric].title} by the sum of what each changes alone. An interaction is the"
        " rest: the difference that one level makes beside the other level, minus the difference"
        " that it makes beside the other's baseline, at the same seed and setting. Above 0 they"
        " cost more together than their sum; statistics are as for the effects.",
    )
    # In units of the standard error; without one, what is largest.
    strongest = sorted(found, key=lambda e: (e.corrected, -abs(_value(e))))
    shown_effects = strongest[:MOST]
    rows = tuple(_row(effect) for effect in shown_effects)
    columns = (
        Column("level"),
        Column("with"),
        Column(f"beyond the sum ({unit})", True),
        Column("95% CI", True),
        Column("p (Holm)", True, "corrected for all interactions"),
        Column("verdict"),
        Column(f"groups {TIMES} seeds", True),
        Column("detectable", True, "true interaction called with 80% power"),
    )
    heads, rows = with_aliases(columns, rows, shown_effects)
    cut = f" The {MOST} strongest." if len(found) > MOST else ""
    caption = f"{counted(len(found), 'interaction')} of two levels.{cut}"
    return Section("Alone and together", (note, Table("interactions", caption, heads, rows)))


def _value(effect: Effect) -> float:
    return effect.estimate.value if effect.estimate else 0.0


def _row(effect: Effect) -> Row:
    assert effect.estimate is not None, "only interactions with an estimate are shown"
    metric, estimate = effect.metric, effect.estimate
    one, other = (f"{factor}={level}" for factor, level in effect.change)
    groups = f"{effect.groups} {TIMES} {len(effect.seeds)}"
    names = (cell(one), cell(other), cell(difference(metric, estimate.value), estimate.value))
    size = cell(groups, effect.groups * len(effect.seeds))
    verdict = _verdict(effect)
    if not effect.tested:
        return Row((*names, EMPTY, EMPTY, cell(verdict), size, EMPTY))
    interval = f"{difference(metric, estimate.low)} to {difference(metric, estimate.high)}"
    detectable = effect.detectable or 0.0
    return Row(
        (
            *names,
            cell(interval, estimate.high - estimate.low),
            cell(p_value(effect.corrected), effect.corrected),
            cell(verdict, tone="" if effect.called else "muted"),
            size,
            cell(shown(metric, detectable), detectable),
        )
    )


def _verdict(effect: Effect) -> str:
    if effect.called:
        above = effect.direction == "higher"
        return "above the sum" if above else "below the sum"
    if effect.verdict == "identical":
        return "additive exactly"
    return "additive within noise" if effect.tested else effect.verdict
