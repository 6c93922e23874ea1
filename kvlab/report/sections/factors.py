"""Baseline and factors: what the sweep varies, and the limits of its comparisons."""

from collections.abc import Iterator
from math import prod

from kvlab.analysis.effects import Effect
from kvlab.analysis.study import Study
from kvlab.humanize import format_count
from kvlab.report.document import (
    Bullets,
    Cell,
    Code,
    Column,
    Row,
    Section,
    Span,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import format_signed
from kvlab.report.record_warnings import list_confounds
from kvlab.report.table_columns import name_aliases
from kvlab.spec.designs import DESIGNS
from kvlab.spec.size_config import MATCH_FACTOR, SIZES


def report_factors(study: Study) -> Section:
    """List the design, its factors with their levels, and notes on what can be compared."""
    seeds = ", ".join(map(str, study.seeds))
    n_trainings = len({row.training for row in study.done_rows if row.training})
    baseline = ", ".join(
        f"{factor}={level}" for factor, level in zip(study.factors, study.baseline, strict=True)
    )
    intro = paragraph(
        f"A {_title(study)} design: {format_count(len(study.cells), 'cell')} at"
        f" {format_count(len(study.seeds), 'seed')} ({seeds}). The"
        f" {format_count(len(study.done_rows), 'trial')} measured rest on"
        f" {format_count(n_trainings, 'training')}: cells that differ only in serving"
        " share weights. At one seed all cells see the same batches in the same order. The"
        f" baseline, called baseline below, is {baseline}; every other cell is named by the levels"
        " in which it differs.",
    )
    notes = Bullets(tuple(_notes(study)))
    return Section("Baseline and factors", (intro, _table(study), notes), is_appendix=True)


def _title(study: Study) -> str:
    """Return the design's title, such as ``full factorial``; several are joined."""
    titles = []
    for name in str(study.sweep.get("design", "full")).split(" + "):
        kind, _, fraction = name.partition(":")
        title = DESIGNS[kind].title if kind in DESIGNS else kind
        titles.append(f"1/{fraction} {title}" if fraction else title)
    return " and ".join(titles)


def _table(study: Study) -> Table:
    patches = study.sweep.get("patches", {})
    rows = []
    for factor, levels in study.factors.items():
        for level in levels:
            patch = patches.get(factor, {}).get(level, {})
            text = ", ".join(f"{key}: {value}" for key, value in patch.items())
            role = "baseline" if level == levels[0] else ""
            setting = Cell(text or "as the base experiment", text, code=bool(text))
            if factor == MATCH_FACTOR and level in SIZES and "match" in study.sweep:
                setting = cell(f"model.ffn_dim by cell, for the baseline's {SIZES[level].unit}")
            names = (cell(factor), cell(level), cell(role))
            rows.append(Row((*names, setting)))
    columns = (Column("factor"), Column("level"), Column("role"), Column("what it sets"))
    return Table("factors", "Factors and their levels.", columns, tuple(rows))


def _notes(study: Study) -> Iterator[tuple[Span, ...]]:
    yield from ((f"{rule}.",) for rule in study.sweep.get("rules", ()))
    full = prod(len(levels) for levels in study.factors.values())
    absent_cells = full - len(study.cells)
    if absent_cells and study.sweep.get("design", "full") == "full":
        partner = "A level is compared only where its partner exists."
        if study.sweep.get("rules"):  # they say already what is not there
            yield (partner,)
        else:
            combinations = _absent_pairs(study)
            absent = f": {'; '.join(combinations)} never occur" if combinations else ""
            text = f"{absent_cells} of {full} combinations are not in the design{absent}."
            yield (f"{text} {partner}",)
    # the notes of a design name its effects by factors, and here each effect names its aliases
    for note in study.sweep.get("notes", ()):
        if " is aliased with " not in note:
            yield (f"The design has {note}.",)
    for effect in study.effects(study.primary_metric):
        yield from _limit_notes(effect)
    for mode in study.match_modes:
        if mode in SIZES:
            yield _describe_matched_sizes(study, mode)
    yield from _parameter_notes(study)
    if study.done_rows and not study.is_untrained:
        yield (_describe_tuning(study),)
    yield from list_confounds(study)


def _describe_tuning(study: Study) -> str:
    """Say what of the recipe was tuned for each cell, or that nothing was."""
    tuning = study.sweep.get("tuning")
    if not tuning:
        return (
            "Every cell is trained by the recipe of its experiment. The recipe was not tuned for"
            " any of them, so a level that needs another learning rate looks worse than it is."
        )
    optima = [entry["optimum"] or {} for entry in tuning["architectures"]]
    values = [one["value"] for one in optima if one.get("value")]
    span = f" ({min(values):g} to {max(values):g})" if values else ""
    n_flagged = sum(bool(one.get("flag")) for one in optima)
    flagged = (
        f" For {n_flagged} of {len(optima)} the best is not between the values that were tried."
        if n_flagged
        else ""
    )
    return (
        f"Every architecture is trained at a {tuning['key']} of its own{span}, tuned at seeds that"
        f" no comparison uses; the rest of the recipe is that of the experiment. Intervals hold at"
        f" these rates.{flagged}"
    )


def _describe_matched_sizes(study: Study, mode: str) -> tuple[Span, ...]:
    """Say what was made equal by resizing."""
    is_factor = len(study.match_modes) > 1
    where = f"The cells with {MATCH_FACTOR}={mode}" if is_factor else "All cells"
    whose = "the baseline of their size" if study.sweep.get("size") else "the baseline"
    return (
        f"{where} were matched with {whose} in {SIZES[mode].unit} by ",
        Code("model.ffn_dim"),
        ".",
    )


def _parameter_notes(study: Study) -> Iterator[tuple[Span, ...]]:
    """Note the levels that also change the number of parameters."""
    changes = []
    for factor, levels in study.factors.items():
        for level in levels[1:]:
            shares = _parameter_shares(study, factor, level)
            if shares and max(abs(share) for share in shares) >= 5e-4:
                low, high = (
                    f"{format_signed(100 * share, 1)}%" for share in (min(shares), max(shares))
                )
                changes.append(f"{factor}={level} ({low if low == high else f'{low} to {high}'})")
    if changes:
        resized = " there" if any(mode in SIZES for mode in study.match_modes) else ""
        yield (
            f"Some levels also change the number of parameters: {', '.join(changes)}. Their"
            f" effects include that: no model was resized{resized}.",
        )


def _parameter_shares(study: Study, factor: str, level: str) -> list[float]:
    """Return a level's relative change of the parameters, in every cell that has a partner.

    Cells that were matched in parameters are left out.
    """
    index = list(study.factors).index(factor)
    shares = []
    for levels in study.cells:
        partner = (*levels[:index], study.factors[factor][0], *levels[index + 1 :])
        count, partner_count = study.parameters(levels), study.parameters(partner)
        is_matched = study.match_mode(levels) == "parameters"
        if levels[index] == level and count and partner_count and not is_matched:
            shares.append(count / partner_count - 1)
    return shares


def _limit_notes(effect: Effect) -> Iterator[tuple[Span, ...]]:
    if effect.aliases:
        listed = name_aliases(effect, ", ")
        yield Code(effect.name), f" is aliased with {listed}: this design cannot tell them apart."
    elif not effect.pairs_designed:
        yield (
            Code(effect.name),
            " has no cell that differs from it in this factor alone: its effect cannot be told"
            " from those of the other factors.",
        )
    elif effect.limits:
        where = " and ".join(f"{factor}={'|'.join(ls)}" for factor, ls in effect.limits)
        yield (Code(effect.name), f" is compared only at {where}.")


def _absent_pairs(study: Study) -> list[str]:
    """Return the pairs of levels of two factors that no cell combines."""
    factors = list(study.factors.items())
    present: set[tuple[int, str, int, str]] = set()
    for levels in study.cells:
        for i in range(len(levels)):
            for j in range(i + 1, len(levels)):
                present.add((i, levels[i], j, levels[j]))
    return [
        f"{first}={one} with {second}={other}"
        for i, (first, ones) in enumerate(factors)
        for j, (second, others) in enumerate(factors)
        if i < j
        for one in ones
        for other in others
        if (i, one, j, other) not in present
    ]
