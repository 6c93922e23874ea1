"""Cells whose sizes were matched by the width of the MLP."""

from collections.abc import Iterator
from functools import partial

from kvlab.analysis.effects import Effect, estimate_main_effects
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.spec.size_config import MATCH_FACTOR, SIZES


def report_matched_sizes(study: Study) -> doc.Section | None:
    """List the width and the size of every cell, and the effects with and without matching."""
    modes = [mode for mode in study.match_modes if mode in SIZES]
    if not modes:
        return None
    units = [SIZES[mode].unit for mode in modes]
    contents: list[doc.Content] = [texts.write("matched sizes", study=study, units=units)]
    caption = "Widths and sizes of the cells."
    table = cols.cells_table(study, "matched", caption, partial(_size_entries, study))
    contents += [table] if table.rows else []
    # tests that the sweep has declared judge its claims, over all ways together
    if len(study.match_modes) > 1 and study.tests is None:
        effects = list(_estimate_by_mode(study))
        rows = [
            (_mode_entries(study, mode, effect), study.change_key(effect.change))
            for mode, effect in effects
        ]
        if any(effect.estimate for _, effect in effects):
            caption = texts.fill("caption of matched effects", study=study)
            contents.append(doc.make_table("matched-effects", caption, rows))
    return doc.Section("Matched sizes", tuple(contents))


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
    yield "matched in", doc.cell(study.match_mode(levels))
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


def _estimate_by_mode(study: Study) -> Iterator[tuple[str, Effect]]:
    """Yield the effects within the cells of each way of matching, level by level.

    The error is shared by the ways, so that all rows hold together (Bonferroni).
    """
    index = list(study.factors).index(MATCH_FACTOR)
    by_mode = []
    for mode in study.match_modes:
        effects = estimate_main_effects(
            {levels: rows for levels, rows in study.cells.items() if levels[index] == mode},
            {**study.factors, MATCH_FACTOR: (mode,)},
            study.primary_metric,
            claims=study.claims,
            alpha=study.decide.alpha / len(study.match_modes),
            margin=study.decide.margin,
        )
        by_mode.append([(mode, effect) for effect in effects])
    for same_level in zip(*by_mode, strict=True):
        yield from same_level


def _mode_entries(study: Study, mode: str, effect: Effect) -> doc.Entries:
    metric, (factor, level) = study.primary_metric, effect.change[0]
    yield "factor", factor
    yield "level", level
    yield "sizes", mode, f"none: as the levels make them; else {MATCH_FACTOR}"
    difference = doc.EMPTY_CELL
    if effect.estimate:
        difference = cols.difference_cell(metric, effect.value)
    yield f"difference ({fmt.difference_unit(metric)})", difference
    hint = "holds for all rows of the table"
    interval = cols.simultaneous_column(metric, study.decide.alpha, hint)
    yield interval, cols.simultaneous_cell(metric, effect)
    yield "verdict", cols.verdict_cell(effect), "of the level at sizes matched so"
