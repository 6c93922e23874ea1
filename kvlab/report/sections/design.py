"""The design: what the sweep varies and can compare, and matched sizes."""

from collections.abc import Iterator
from functools import partial
from math import prod

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.own_extensions import find_members
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.record_warnings import list_confounds
from kvlab.spec.designs import DESIGNS
from kvlab.spec.size_config import SIZES


def report_factors(study: Study) -> doc.Section:
    """List the design, its factors with their levels, and notes on what can be compared."""
    titles = []
    for name in str(study.sweep.get("design", "full")).split(" + "):
        kind, _, fraction = name.partition(":")
        title = DESIGNS[kind].title if kind in DESIGNS else kind
        titles.append(f"1/{fraction} {title}" if fraction else title)
    baseline = dict(zip(study.factors, study.baseline, strict=True))
    trainings = {row.training for row in study.done_rows if row.training}
    fields = {"titles": titles, "trainings": trainings, "baseline": baseline}
    note = texts.write("design", study=study, **fields)
    rows = [
        (_level_entries(study, factor, level), "")
        for factor, levels in study.factors.items()
        for level in levels
    ]
    table = doc.make_table("factors", "Factors and their levels.", rows)
    contents = (note, table, doc.Bullets(tuple(_notes(study))))
    return doc.Section("Baseline and factors", contents, is_appendix=True)


def _level_entries(study: Study, factor: str, level: str) -> doc.Entries:
    yield "factor", factor
    yield "level", level
    yield "role", "baseline" if level == study.factors[factor][0] else ""
    patch = study.sweep.get("patches", {}).get(factor, {}).get(level, {})
    text = fmt.format_settings(patch)
    setting = doc.Cell(text or "as the base experiment", text, code=bool(text))
    yield "what it sets", setting


def _notes(study: Study) -> Iterator[tuple[doc.Span, ...]]:
    yield from ((f"{rule}.",) for rule in study.sweep.get("rules", ()))
    full = prod(len(levels) for levels in study.factors.values())
    if full > len(study.cells) and study.sweep.get("design", "full") == "full":
        yield ("A level is compared only where its partner exists.",)
    # the notes of a design name its effects by factors, and here each effect names its aliases
    for note in study.sweep.get("notes", ()):
        if " is aliased with " not in note:
            yield (f"The design has {note}.",)
    for effect in study.effects(study.primary_metric):
        if effect.aliases or effect.limits or not effect.pairs_designed:
            aliases = cols.name_aliases(effect, ", ")
            yield texts.spans("limits of a level", effect=effect, aliases=aliases)
    is_resized = study.match_mode in SIZES
    if is_resized:
        unit = SIZES[study.match_mode].unit
        yield texts.spans("cells of a matched size", study=study, unit=unit)
    if changes := ", ".join(_parameter_changes(study)):
        yield texts.spans("changed parameters", changes=changes, is_resized=is_resized)
    if study.done_rows and not study.is_untrained and not study.is_given:
        described = (describe(study) for describe in find_members("recipes").values())
        yield next(filter(None, described), texts.spans("recipe"))
    yield from list_confounds(study)


def _parameter_changes(study: Study) -> Iterator[str]:
    """Name the levels that also change the number of parameters, unless cells match in them."""
    if study.match_mode == "parameters":
        return
    for index, (factor, levels) in enumerate(study.factors.items()):
        for level in levels[1:]:
            shares = []
            for own in study.cells:
                count = study.parameters(own)
                base = study.parameters((*own[:index], levels[0], *own[index + 1 :]))
                if own[index] == level and count and base:
                    shares.append(count / base - 1)
            if shares and max(map(abs, shares)) >= 5e-4:
                ends = fmt.format_ends(shares, lambda one: f"{fmt.format_signed(100 * one, 1)}%")
                yield f"{factor}={level} ({ends})"


# Matched sizes


def report_matched_sizes(study: Study) -> doc.Section | None:
    """List the width and the size of every cell."""
    if study.match_mode not in SIZES:
        return None
    text = texts.write("matched sizes", study=study, unit=SIZES[study.match_mode].unit)
    caption = "Widths and sizes of the cells."
    table = cols.cells_table(study, "matched", caption, partial(_size_entries, study))
    return doc.Section("Matched sizes", (text, table) if table.rows else (text,))


def _size_entries(study: Study, levels: Levels) -> doc.Entries:
    records = [row.record.get("experiment", {}) for row in study.cells[levels].values()]
    widths = [one["model"]["ffn_dim"] for one in records if "ffn_dim" in one.get("model", {})]
    parameters = study.parameters(levels)
    if not widths or parameters is None:
        return
    size_factor = (study.sweep.get("size") or {}).get("factor")
    baseline = tuple(  # at the cell's own level of the factor that is its size
        own if factor == size_factor else base
        for factor, own, base in zip(study.factors, levels, study.baseline, strict=True)
    )
    flops = _flops_per_token(study, levels)
    yield "ffn_dim", int(widths[0])
    yield "parameters", parameters
    yield "FLOPs/token", cols.number_cell(flops, "{:,.0f}".format), "of training"
    for title, size, target in (
        ("parameters off (%)", parameters, study.parameters(baseline)),
        ("FLOPs off (%)", flops, _flops_per_token(study, baseline)),
    ):
        miss = 100 * (size / target - 1) if size and target else None
        cell = cols.number_cell(miss, lambda miss: fmt.format_signed(miss, 2) if miss else "0.00")
        yield doc.Column(title, True, "from the baseline's"), cell


def _flops_per_token(study: Study, levels: Levels) -> float | None:
    """Return a cell's training FLOPs a token; None if it was not trained."""
    for row in study.cells.get(levels, {}).values():
        tokens = (row.record.get("training_record") or {}).get("tokens")
        if tokens and "model" in row.record:
            return int(row.record["model"]["training_flops"]) / int(tokens)
    return None
