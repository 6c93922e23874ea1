"""Interactions: whether levels together cost the sum of what each costs alone."""

from kvlab.analysis.effects import SPLIT_SHARE, Effect
from kvlab.analysis.study import Study
from kvlab.analysis.verdicts import VERDICTS
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Column,
    Content,
    Fold,
    Paragraph,
    Row,
    Section,
    Span,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import MINUS, difference_unit, format_difference
from kvlab.report.table_columns import (
    append_aliases,
    csv_only,
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

MAX_OPEN_ROWS = 12
"""Rows of a table that is not folded."""


def report_interactions(study: Study) -> Section | None:
    """List the interactions of the levels that ran together, in the primary metric."""
    effects = [effect for effect in study.interactions(study.primary_metric) if effect.estimate]
    if not effects:
        return None
    # By corrected p-value; untested ones by size.
    strongest = sorted(effects, key=lambda e: (e.corrected_p, -abs(e.value)))
    table = _table(study, strongest)
    contents: list[Content] = [_summarize(study, strongest)]
    found = any(effect.is_significant for effect in effects)
    is_open = len(table.rows) <= MAX_OPEN_ROWS and (found or len(effects) == 1)
    contents.append(table if is_open else Fold("All interactions", (table,)))
    contents.append(Fold("How interactions are estimated", (paragraph(_explain(effects)),)))
    return Section("Do the costs add up?", tuple(contents))


def _summarize(study: Study, strongest: list[Effect]) -> Paragraph:
    """Say which levels together do more, or less, than the sum of each alone."""
    title, unit = METRICS[study.primary_metric].title, difference_unit(study.primary_metric)
    start = f"Costs add up if levels together change the {title} by the sum of what each changes"
    found = [effect for effect in strongest if effect.is_significant]
    tested = [effect for effect in strongest if effect.has_interval]
    spans: list[Span] = [f"{start} alone. "]
    if found:
        spans += [f"{len(found):,} of {format_count(len(strongest), 'sum')} is off"]
        if len(found) > 1:
            spans[-1] = f"{len(found):,} of {format_count(len(strongest), 'sum')} are off"
        spans += [". The clearest is ", Strong(_name(found[0])), ": "]
        size = f"{format_difference(found[0].metric, found[0].value)} {unit}".strip()
        spans.append(f"{size} beyond the sum, {_verdict(found[0])}.")
    elif len(strongest) == 1:
        size = f"{format_difference(strongest[0].metric, strongest[0].value)} {unit}".strip()
        spans += [
            Strong(_name(strongest[0])),
            f": {size} beyond the sum, {_verdict(strongest[0])}.",
        ]
    elif tested:
        count = format_count(len(tested), "sum")
        spans.append(f"None of {count} is found to be off beyond the noise.")
    else:
        spans.append("No sum could be tested.")
    if any(len(effect.change) > 2 for effect in strongest):
        spans.append(
            " This design runs single levels and all together, so it has one such row: all"
            " together against the sum of the parts."
        )
    return paragraph(*spans)


def _explain(effects: list[Effect]) -> str:
    text = (
        "An interaction is the difference that one level makes beside the other level, minus the"
        " difference that it makes beside the other's baseline level, at the same seed and setting."
        " Above 0 the levels cost more together than the sum. Interactions are estimated and judged"
        f" as the effects are, at {SPLIT_SHARE:g} of their error: intervals and verdicts hold for"
        " all rows together. Where an interaction is found, the table of effects has the level"
        " beside each level of the other factor."
    )
    if any(effect.is_contrast for effect in effects):
        text += (
            " Where this design has no four matching cells, an interaction is a contrast over all"
            " cells. Interactions that are the same contrast share one row, which names them all:"
            " the number belongs to their sum."
        )
    return text


def _table(study: Study, strongest: list[Effect]) -> Table:
    metric = study.primary_metric
    unit = difference_unit(metric)
    shown = strongest[:MAX_ROWS]
    columns = (
        Column("levels together"),
        Column(f"beyond the sum ({unit})" if unit else "beyond the sum", True),
        simultaneous_column(metric, SPLIT_SHARE * study.decide.alpha, "for all rows together"),
        Column("verdict"),
        Column("p (corrected)", True, "for all interactions"),
        csv_only(groups_column()),
        csv_only(detectable_column(unit, "true interaction called with 80% power")),
    )
    rows = tuple(_row(study, effect) for effect in shown)
    all_columns, rows = append_aliases(columns, rows, shown)
    cut_note = f" The {MAX_ROWS} strongest." if len(strongest) > MAX_ROWS else ""
    caption = f"{format_count(len(strongest), 'interaction')}, the clearest first.{cut_note}"
    return Table("interactions", caption, all_columns, rows)


def _row(study: Study, effect: Effect) -> Row:
    assert effect.estimate is not None, "only interactions with an estimate are shown"
    return Row(
        (
            cell(_name(effect)),
            difference_cell(effect.metric, effect.estimate.value),
            simultaneous_cell(effect),
            cell(_verdict(effect), tone=VERDICTS[effect.verdict_name].tone),
            p_cell(effect, effect.corrected_p) if effect.has_interval else EMPTY_CELL,
            groups_cell(effect),
            detectable_cell(effect),
        ),
        study.change_key(effect.change),
    )


def _name(effect: Effect) -> str:
    """Return the levels of an interaction, and of all others that are the same contrast."""
    names = [" + ".join(f"{factor}={level}" for factor, level in effect.change)]
    for sign, change in effect.same_as:
        other = " + ".join(f"{factor}={level}" for factor, level in change)
        names.append(other if sign > 0 else f"{MINUS}({other})")
    return " or ".join(names)


def _verdict(effect: Effect) -> str:
    words = {
        "higher": "above the sum",
        "lower": "below the sum",
        "identical": "additive exactly",
        "equivalent": f"additive within {effect.margin or 0.0:g}",
        "within noise": "additive within noise",
    }
    return words.get(effect.verdict_name, effect.verdict)
