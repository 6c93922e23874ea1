"""Looks: what was decided after how many seeds, and seeds that were added after a report."""

import math

from kvlab.analysis.looks import TakenLook
from kvlab.analysis.sequential import (
    ClaimState,
    repeated_test_error,
    spent_alpha,
    t_bounds,
)
from kvlab.analysis.study import Study
from kvlab.analysis.verdicts import VERDICTS
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Code,
    Column,
    Content,
    Fold,
    Row,
    Section,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import (
    difference_unit,
    format_fixed,
    format_magnitude,
    format_significant,
)
from kvlab.report.table_columns import difference_cell, range_cell, range_column
from kvlab.spec.seeds_config import SeedLooks


def report_looks(study: Study) -> Section | None:
    """Report the looks of a sequential sweep, or seeds that were added after a report."""
    seeds = study.declared_looks
    warning = [_warn_of_added_seeds(study)] if study.reported_sizes else []
    if seeds is not None:
        return Section("Looks", (*warning, *_report_declared(study, seeds)))
    return Section("Looks that were not declared", tuple(warning)) if warning else None


def _warn_of_added_seeds(study: Study) -> Content:
    """Say what adding seeds after a report does to the error."""
    before, alpha = study.reported_sizes, study.decide.alpha
    sizes = (*before, len(study.seeds))
    text = (
        f"A report was written at {', '.join(map(str, before))} seeds, and then seeds were added:"
        f" now there are {sizes[-1]}. A test that is repeated at these numbers of seeds finds a"
        f" difference that is not there with probability {repeated_test_error(sizes, alpha):.0%},"
        f" not {alpha:g} (simulated t-tests). So the verdicts of this report are weaker than they"
        " say. To add seeds and keep the error, declare the looks before the first trial: "
    )
    return paragraph(text, Code(f"seeds: {{looks: [{', '.join(map(str, sizes))}]}}"), ".")


def _report_declared(study: Study, seeds: SeedLooks) -> list[Content]:
    claims, sizes = format_count(len(study.claims), "claim"), ", ".join(map(str, seeds.looks))
    text = (
        f"The sweep declared looks at {sizes} seeds and {claims} before its first trial. After each"
        f" look only undecided claims got more seeds. {_describe_savings(study, seeds)}"
    )
    contents: list[Content] = [paragraph(text), _looks_table(study, seeds)]
    if study.taken_looks:
        contents.append(Fold("Every claim at every look", (_claims_table(study),)))
    return [*contents, Fold("How looks decide", (paragraph(_explain(study)),))]


def _explain(study: Study) -> str:
    alpha, margin = study.decide.alpha, study.decide.margin
    text = (
        f"All claims at all looks together are wrong with probability {alpha:g} at most. The looks"
        " share this error by O'Brien and Fleming's rule, which spends little of it early. A claim"
        " is decided once its |t|, from its own differences over seeds, reaches the bound."
    )
    if margin is not None:
        unit = difference_unit(study.primary_metric)
        size = f"{format_magnitude(study.primary_metric, margin)} {unit}".strip()
        text += f" It is decided, too, once its interval ends below the margin of {size}."
    return text + (
        " A claim that is found passes its error on to the others (Holm). If this step alone"
        " decides a claim, its interval ends at zero. Cells, and levels beside single settings, are"
        " judged with the part of the error that the looks so far may spend. Interactions are"
        " tested once, as if these seeds had been chosen beforehand: they are exploratory."
    )


def _describe_savings(study: Study, seeds: SeedLooks) -> str:
    planned = sum(len(by_seed) for by_seed in study.cells.values())
    most = len(study.cells) * seeds.looks[-1]
    saved = most - planned
    text = f"{format_count(planned, 'result')} of at most {most:,} were asked for"
    looks = study.taken_looks
    is_over = bool(looks) and not looks[-1].has_open_claims
    if saved and is_over:
        text += f": {saved:,} fewer ({saved / most:.0%}) than {seeds.looks[-1]} seeds of every cell"
    if not looks:
        return f"{text}. No look has been taken yet."
    return f"{text}." if is_over else f"{text}. The sweep goes on: claims are undecided."


def _looks_table(study: Study, seeds: SeedLooks) -> Table:
    alpha, maximum = study.decide.alpha, seeds.looks[-1]
    bounds = t_bounds(seeds.looks, maximum, alpha / len(study.claims))
    columns = (
        Column("look", True),
        Column("seeds", True),
        Column("error spent", True, "of the probability of any wrong claim, up to this look"),
        Column("bound on |t|", True, "for the first claim that is found; lower for later ones"),
        Column("decided"),
        Column("undecided", True),
        Column("given up", True, "of them: more seeds would hardly decide them"),
    )
    rows: list[Row] = []
    before: set[str] = set()
    taken = {look.number: look for look in study.taken_looks}
    for number, size in enumerate(seeds.looks, 1):
        spent = spent_alpha(size / maximum, alpha)
        cells = [
            cell(str(number), number),
            cell(str(size), size),
            cell(format_significant(spent, 2), spent),
            cell(format_significant(bounds[number - 1], 3), bounds[number - 1]),
        ]
        if number not in taken:
            rows.append(Row((*cells, *(EMPTY_CELL,) * 3), tone="muted"))
            continue
        states = taken[number].states
        new = [name for name, s in states.items() if s.outcome and name not in before]
        before |= set(new)
        left = [state for state in states.values() if not state.outcome]
        futile = sum(not state.is_open for state in left) if size < maximum else 0
        cells += [
            cell(", ".join(new) or "nothing"),
            cell(str(len(left)), len(left)),
            cell(str(futile), futile),
        ]
        rows.append(Row(tuple(cells)))
    return Table("looks", "Looks, as declared and as taken.", columns, tuple(rows))


def _claims_table(study: Study) -> Table:
    metric = study.taken_looks[0].metric
    columns = (
        Column("claim"),
        Column("look", True),
        Column("seeds", True, "with all trials that it is compared over"),
        Column(f"difference ({difference_unit(metric)})", True),
        range_column("interval", difference_unit(metric), "repeated, simultaneous"),
        Column("t", True),
        Column("bound on |t|", True, "at the claim's level there"),
        Column("decision"),
    )
    rows = [
        _claim_row(study, claim, look)
        for claim in study.claims
        for look in _own_looks(study, claim)
    ]
    caption = "Claims at the looks at which they had new seeds, up to their decision."
    return Table("claims", caption, columns, tuple(rows))


def _own_looks(study: Study, claim: str) -> list[TakenLook]:
    """Return the looks at which a claim was tested."""
    looks: list[TakenLook] = []
    sizes: tuple[int, ...] = ()
    for look in study.taken_looks:
        if look.states[claim].sizes != sizes:
            sizes = look.states[claim].sizes
            looks.append(look)
    return looks


def _claim_row(study: Study, claim: str, look: TakenLook) -> Row:
    state = look.states[claim]
    factor, _, level = claim.partition("=")
    cells = (
        cell(claim),
        cell(str(look.number), look.number),
        cell(str(state.sizes[-1]), state.sizes[-1]),
        difference_cell(look.metric, state.value),
        range_cell(look.metric, state.low, state.high),
        _number_cell(state.statistic),
        _number_cell(state.bound),
        _decision_cell(study, state),
    )
    return Row(cells, study.change_key(((factor, level),)))


def _number_cell(value: float) -> Cell:
    if math.isinf(value):
        return EMPTY_CELL
    return cell(format_fixed(value, 2) if abs(value) < 100 else format_significant(value), value)


def _decision_cell(study: Study, state: ClaimState) -> Cell:
    if not state.outcome:
        return cell("goes on" if state.is_open else "undecided", tone="muted")
    verdict = VERDICTS[state.outcome]
    return cell(verdict.words.format(margin=f"{study.decide.margin or 0:g}"), tone=verdict.tone)
