"""Cells whose sizes were matched by the width of the MLP, and effects before and after that."""

from collections.abc import Iterator

from kvlab.analysis.effects import Effect, estimate_main_effects
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Row,
    Section,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import difference_unit, format_fixed, format_signed
from kvlab.report.table_columns import (
    difference_cell,
    simultaneous_cell,
    simultaneous_column,
    verdict_cell,
)
from kvlab.spec.size_config import MATCH_FACTOR, SIZES
from kvlab.store.metrics import METRICS


def report_matched_sizes(study: Study) -> Section | None:
    """List the width and the size of every cell, and the effects with and without matching."""
    modes = [mode for mode in study.match_modes if mode in SIZES]
    if not modes:
        return None
    units = " or ".join(SIZES[mode].unit for mode in modes)
    contents: list[Content] = [
        paragraph(
            "A level that also changes the size of the model has two effects in one. Here"
            f" model.ffn_dim was set by cell to the whole number that comes nearest to the {units}"
            f" of {_whose(study)}. A resized MLP starts from weights of its own, so it is paired by"
            " its batches alone."
        )
    ]
    rows = [row for levels in study.cells if (row := _size_row(study, levels)) is not None]
    if rows:
        contents.append(_size_table(rows))
    contents += _effect_table(study)
    return Section("Matched sizes", tuple(contents))


def _whose(study: Study) -> str:
    return "the baseline of its size" if study.sweep.get("size") else "the baseline"


def _size_table(rows: list[Row]) -> Table:
    columns = (
        Column("cell"),
        Column("matched in"),
        Column("ffn_dim", True),
        Column("parameters", True),
        Column("FLOPs/token", True, "of training"),
        Column("parameters off (%)", True, "from the baseline's"),
        Column("FLOPs off (%)", True, "from the baseline's"),
    )
    return Table("matched", "Widths and sizes of the cells.", columns, tuple(rows))


def _size_row(study: Study, levels: Levels) -> Row | None:
    width, parameters = _ffn_dim(study, levels), study.parameters(levels)
    if width is None or parameters is None:
        return None
    flops = _flops_per_token(study, levels)
    baseline = _own_baseline(study, levels)
    cells = (
        cell(study.label(levels)),
        cell(study.match_mode(levels)),
        cell(f"{width:,}", width),
        cell(f"{parameters:,}", parameters),
        EMPTY_CELL if flops is None else cell(f"{flops:,.0f}", flops),
        _miss_cell(parameters, study.parameters(baseline)),
        _miss_cell(flops, _flops_per_token(study, baseline)),
    )
    return Row(cells, study.cell_key(levels))


def _own_baseline(study: Study, levels: Levels) -> Levels:
    """Return the baseline cell, at the cell's own level of the factor that is its size."""
    size_factor = (study.sweep.get("size") or {}).get("factor")
    return tuple(
        own if factor == size_factor else base
        for factor, own, base in zip(study.factors, levels, study.baseline, strict=True)
    )


def _miss_cell(size: float | None, target: float | None) -> Cell:
    if not size or not target:
        return EMPTY_CELL
    miss = 100 * (size / target - 1)
    return cell(format_signed(miss, 2) if miss else format_fixed(0.0, 2), miss)


def _ffn_dim(study: Study, levels: Levels) -> int | None:
    for row in study.cells[levels].values():
        model = row.record.get("experiment", {}).get("model", {})
        if "ffn_dim" in model:
            return int(model["ffn_dim"])
    return None


def _flops_per_token(study: Study, levels: Levels) -> float | None:
    """Return a cell's training FLOPs a token; None if it was not trained."""
    for row in study.cells.get(levels, {}).values():
        tokens = (row.record.get("training_record") or {}).get("tokens")
        if tokens and "model" in row.record:
            return int(row.record["model"]["training_flops"]) / int(tokens)
    return None


def _effect_table(study: Study) -> Iterator[Content]:
    """Yield every level's effect once for each way in which sizes were matched.

    Sweeps with looks have judged their claims already, over all ways together.
    """
    if len(study.match_modes) < 2 or study.declared_looks is not None:
        return
    metric, effects = study.primary_metric, list(_estimate_by_mode(study))
    if not any(effect.estimate for _, effect in effects):
        return
    unit, alpha = difference_unit(metric), study.decide.alpha
    columns = (
        Column("factor"),
        Column("level"),
        Column("sizes", hint=f"none: as the levels make them; else {MATCH_FACTOR}"),
        Column(f"difference ({unit})", True),
        simultaneous_column(metric, alpha, "holds for all rows of the table"),
        Column("verdict"),
    )
    rows = tuple(
        Row(
            (
                cell(effect.change[0][0]),
                cell(effect.change[0][1]),
                cell(mode),
                difference_cell(metric, effect.value) if effect.estimate else EMPTY_CELL,
                simultaneous_cell(effect),
                verdict_cell(effect),
            ),
            study.change_key(effect.change),
        )
        for mode, effect in effects
    )
    yield Table(
        "matched-effects",
        f"Effects on the {METRICS[metric].title}, by the way in which sizes were matched.",
        columns,
        rows,
    )


def _estimate_by_mode(study: Study) -> Iterator[tuple[str, Effect]]:
    """Yield the effects within the cells of each way, level by level.

    The error is shared by the ways, so that all rows hold together (Bonferroni).
    """
    index = list(study.factors).index(MATCH_FACTOR)
    by_mode = []
    for mode in study.match_modes:
        cells = {levels: rows for levels, rows in study.cells.items() if levels[index] == mode}
        factors = {**study.factors, MATCH_FACTOR: (mode,)}
        effects = estimate_main_effects(
            cells,
            factors,
            study.primary_metric,
            claims=study.claims,
            alpha=study.decide.alpha / len(study.match_modes),
            margin=study.decide.margin,
        )
        by_mode.append([(mode, effect) for effect in effects])
    for same_level in zip(*by_mode, strict=True):
        yield from same_level
