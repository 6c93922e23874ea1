"""Two-way interactions: whether two levels together cost the sum of what each costs alone."""

from kvlab.analysis.effects import Effect
from kvlab.analysis.study import Study
from kvlab.analysis.verdicts import VERDICTS
from kvlab.humanize import format_count
from kvlab.report.document import EMPTY_CELL, Column, Row, Section, Table, cell, paragraph
from kvlab.report.formatting import difference_unit
from kvlab.report.table_columns import (
    append_aliases,
    detectable_cell,
    detectable_column,
    difference_cell,
    groups_cell,
    groups_column,
    p_cell,
    simultaneous_cell,
    simultaneous_column,
)
from kvlab.store.metrics import METRICS

MAX_ROWS = 60
"""Rows of the table; the strongest interactions come first."""


def report_interactions(study: Study) -> Section | None:
    """List the interactions of every two levels in the primary metric."""
    metric = study.primary_metric
    effects = [effect for effect in study.interactions(metric) if effect.estimate]
    if not effects:
        return None
    unit = difference_unit(metric)
    note = paragraph(
        "Additive means that two levels together change the"
        f" {METRICS[metric].title} by the sum of what each changes alone. An interaction is the"
        " rest: the difference that one level makes beside the other level, minus the difference"
        " that it makes beside the other's baseline, at the same seed and setting. Above 0 they"
        " cost more together than their sum. Each is tested by its own paired t-test over seeds;"
        " intervals and verdicts hold for all interactions of the table together.",
    )
    # By corrected p-value; untested ones by size.
    strongest = sorted(effects, key=lambda e: (e.corrected_p, -abs(e.value)))
    shown_effects = strongest[:MAX_ROWS]
    rows = tuple(_row(study, effect) for effect in shown_effects)
    columns = (
        Column("level"),
        Column("with"),
        Column(f"beyond the sum ({unit})", True),
        simultaneous_column(metric, study.decide.alpha, "holds for all interactions together"),
        Column("verdict"),
        Column("p (corrected)", True, "for all interactions"),
        groups_column(),
        detectable_column(unit, "true interaction called with 80% power"),
    )
    all_columns, rows = append_aliases(columns, rows, shown_effects)
    cut_note = f" The {MAX_ROWS} strongest." if len(effects) > MAX_ROWS else ""
    caption = f"{format_count(len(effects), 'interaction')} of two levels.{cut_note}"
    return Section("Alone and together", (note, Table("interactions", caption, all_columns, rows)))


def _row(study: Study, effect: Effect) -> Row:
    assert effect.estimate is not None, "only interactions with an estimate are shown"
    one, other = (f"{factor}={level}" for factor, level in effect.change)
    return Row(
        (
            cell(one),
            cell(other),
            difference_cell(effect.metric, effect.estimate.value),
            simultaneous_cell(effect),
            cell(_verdict(effect), tone=VERDICTS[effect.verdict_name].tone),
            p_cell(effect, effect.corrected_p) if effect.has_interval else EMPTY_CELL,
            groups_cell(effect),
            detectable_cell(effect),
        ),
        study.change_key(effect.change),
    )


def _verdict(effect: Effect) -> str:
    words = {
        "higher": "above the sum",
        "lower": "below the sum",
        "identical": "additive exactly",
        "equivalent": f"additive within {effect.margin or 0.0:g}",
        "within noise": "additive within noise",
    }
    return words.get(effect.verdict_name, effect.verdict)
