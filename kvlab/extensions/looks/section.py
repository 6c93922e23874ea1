"""Looks: what was decided after how many seeds, and seeds that were added after a report."""

import math
from collections.abc import Iterator

from kvlab.analysis.study import Study
from kvlab.analysis.verdicts import VERDICTS, write_verdict
from kvlab.extensions.looks.judgement import LookTests, TakenLook
from kvlab.extensions.looks.sequential import repeated_test_error, spent_alpha, t_bounds
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts


def report_looks(study: Study) -> doc.Section | None:
    """Report the looks of a sequential sweep, or seeds that were added after a report."""
    looks, alpha, contents = study.tests, study.decide.alpha, list[doc.Content]()
    if reported := study.undeclared_looks:
        sizes = (*reported, len(study.seeds))
        fields = {"sizes": sizes, "error": repeated_test_error(sizes, alpha), "alpha": alpha}
        contents.append(texts.write("added seeds", **fields))
    if not isinstance(looks, LookTests):
        title = "Looks that were not declared"
        return doc.Section(title, tuple(contents)) if contents else None
    planned = sum(len(by_seed) for by_seed in study.cells.values())
    most = len(study.cells) * looks.sizes[-1]
    note = texts.write("looks", study=study, looks=looks, planned=planned, most=most)
    rows = _look_rows(study, looks)
    contents += [note, doc.make_table("looks", "Looks, as declared and as taken.", rows)]
    if looks.taken:
        caption = "Claims at the looks at which they had new seeds, up to their decision."
        table = doc.make_table("claims", caption, _claim_rows(study, looks))
        contents.append(doc.Fold("Every claim at every look", (table,)))
    contents.append(doc.Fold("How looks decide", (texts.write("how looks decide", study=study),)))
    return doc.Section("Looks", tuple(contents))


def _look_rows(study: Study, looks: LookTests) -> Iterator[doc.KeyedRow]:
    alpha, maximum = study.decide.alpha, looks.sizes[-1]
    bounds = t_bounds(looks.sizes, maximum, alpha / len(study.claims))
    taken = {look.number: look for look in looks.taken}
    before: set[str] = set()
    for number, size in enumerate(looks.sizes, 1):
        shown: tuple[doc.Value, ...] = (doc.EMPTY_CELL,) * 3
        if number in taken:
            states = taken[number].states
            new = [name for name, s in states.items() if s.outcome and name not in before]
            before |= set(new)
            left = [state for state in states.values() if not state.outcome]
            n_futile = sum(not state.is_open for state in left) if size < maximum else 0
            shown = (", ".join(new) or "nothing", len(left), n_futile)
        spent, bound = spent_alpha(size / maximum, alpha), bounds[number - 1]
        spent_cell = doc.cell(fmt.format_significant(spent, 2), spent)
        bound_cell = doc.cell(fmt.format_significant(bound, 3), bound)
        entries = (
            ("look", number),
            ("seeds", size),
            ("error spent", spent_cell, "of the probability of any wrong claim, up to this look"),
            ("bound on |t|", bound_cell, "for the first claim that is found; lower for later ones"),
            ("decided", shown[0]),
            ("undecided", shown[1]),
            ("given up", shown[2], "of them: more seeds would hardly decide them"),
        )
        yield entries, "", number not in taken


def _claim_rows(study: Study, looks: LookTests) -> Iterator[doc.KeyedRow]:
    """Yield every claim at the looks at which it was tested."""
    for claim in study.claims:
        sizes: tuple[int, ...] = ()
        for look in looks.taken:
            if look.states[claim].sizes != sizes:
                sizes = look.states[claim].sizes
                factor, _, level = claim.partition("=")
                yield _claim_entries(study, claim, look), study.change_key(((factor, level),))


def _claim_entries(study: Study, claim: str, look: TakenLook) -> doc.Entries:
    state, metric, unit = look.states[claim], look.metric, fmt.difference_unit(look.metric)
    yield "claim", claim
    yield "look", look.number
    yield "seeds", state.sizes[-1], "with all trials that it is compared over"
    yield f"difference ({unit})", cols.difference_cell(metric, state.value)
    interval = cols.range_column("interval", unit, "repeated, simultaneous")
    yield interval, cols.range_cell(metric, state.low, state.high)
    yield "t", _t_cell(state.statistic)
    yield "bound on |t|", _t_cell(state.bound), "at the claim's level there"
    decision = doc.cell("goes on" if state.is_open else "undecided", tone="muted")
    if state.outcome:
        words = write_verdict(state.outcome, study.decide.margin, metric)
        decision = doc.cell(words, tone=VERDICTS[state.outcome].tone)
    yield "decision", decision


def _t_cell(value: float) -> doc.Cell:
    if math.isinf(value):
        return doc.EMPTY_CELL
    is_small = abs(value) < 100
    text = fmt.format_fixed(value, 2) if is_small else fmt.format_significant(value)
    return doc.cell(text, value)
