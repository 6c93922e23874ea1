"""Serving gap: how decoding through the serving cache changes the loss."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvlab.analysis.serving_gaps import ServingGap
from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Heading,
    Row,
    Section,
    Span,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import (
    PLUS_MINUS,
    format_difference,
    format_metric,
    format_p_value,
    format_significant,
)
from kvlab.report.serving_divergence import serving_divergence
from kvlab.report.table_columns import (
    mean_and_spread,
    mean_column,
    range_cell,
    simultaneous_column,
)


def report_serving_gap(study: Study) -> Section | None:
    """List the cells whose served loss differs from their one-shot loss."""
    gaps = study.means("serving_gap")
    if not gaps:
        return None
    with_gap = [levels for levels in gaps if abs(gaps[levels]) >= GAP_ROUNDING]
    aware = [levels for levels in gaps if _list_trained_formats(study, levels) != {_EXACT}]
    contents: list[Content] = [paragraph(*_summarize(study, with_gap, len(gaps)))]
    if aware:
        contents.append(paragraph(_AWARE))
    if with_gap:
        contents.append(_table(study, with_gap, len(gaps) - len(with_gap)))
    contents += serving_divergence(study)
    contents += _kv_dtype_contents(study)
    contents += _eviction_contents(study)
    return Section("Serving gap", tuple(contents))


def _summarize(study: Study, with_gap: list[Levels], n_cells: int) -> list[Span]:
    spans: list[Span] = [
        "The serving gap is the loss of the same weights on the same text through the serving"
        " cache, minus their one-shot loss. "
    ]
    if not with_gap:
        return [*spans, f"No cell of {n_cells} has one beyond rounding ({GAP_ROUNDING:g} nats)."]
    gaps = study.serving_gaps
    largest = max(with_gap, key=lambda levels: gaps[levels].value)
    has = "has" if len(with_gap) == 1 else "have"
    counted = f"{len(with_gap):,} of {format_count(n_cells, 'cell')}"
    size = format_difference("serving_gap", gaps[largest].value)
    spans += [f"{counted} {has} one; the largest is ", Strong(study.label(largest)), f" at {size}."]
    return spans


_AWARE = (
    "Some cells were trained with K and V as a coarse cache gives them back (training.kv_dtype)."
    " Their one-shot loss is of that forward pass, so a cache of the same format has no gap."
)

_ENDS = ("smallest gap (nats/token)", "largest gap (nats/token)")


def _table(study: Study, with_gap: list[Levels], n_without: int) -> Table:
    columns = (
        Column("cell"),
        Column("n", True),
        mean_column("one-shot loss", "nats/token"),
        mean_column("served loss", "nats/token"),
        mean_column("gap (nats/token)"),
        Column("smallest and largest", True, "gap over seeds", _ENDS),
        simultaneous_column("serving_gap", study.decide.alpha, "over trainings, for all cells"),
        Column("p", True, "corrected for all cells"),
        Column("verdict"),
    )
    left_out = ""
    if n_without:
        others = f"{n_without:,} cells have" if n_without > 1 else "cell has"
        left_out = f"; the other {others} none beyond rounding"
    caption = f"Cells whose serving cache changes the loss{left_out}."
    return Table("serving-gap", caption, columns, tuple(_row(study, levels) for levels in with_gap))


def _row(study: Study, levels: Levels) -> Row:
    values = list(study.values(levels, "serving_gap").values())
    mean, spread = mean_and_spread(values)
    text = format_difference("serving_gap", mean)
    text += f" {PLUS_MINUS} {format_metric('serving_gap', spread)}" if spread is not None else ""
    gap = Cell(text, mean, csv=(mean, spread))
    ends = min(values), max(values)
    range_of_gaps = range_cell("serving_gap", *ends) if len(values) > 1 else EMPTY_CELL
    losses = (
        _mean_cell_with_csv_spread(study, levels, "loss_paired"),
        _mean_cell_with_csv_spread(study, levels, "loss_served"),
    )
    count = cell(str(len(values)), len(values))
    name = cell(study.label(levels))
    test = study.serving_gaps[levels]
    ends_cell, p = EMPTY_CELL, EMPTY_CELL
    if test.interval is not None:
        ends_cell = range_cell("serving_gap", *test.interval)
        p = cell(format_p_value(test.p), test.p)
    cells = (name, count, *losses, gap, range_of_gaps, ends_cell, p, _verdict_cell(test))
    return Row(cells, study.cell_key(levels))


def _verdict_cell(test: ServingGap) -> Cell:
    if not test.is_found:
        words = "within noise" if test.interval is not None else "not tested"
        return cell(words, tone="muted")
    return cell("worse", tone="bad") if test.value > 0 else cell("better", tone="good")


def _kv_dtype_contents(study: Study) -> list[Content]:
    """Report what storing K and V in another dtype costs, if cells do."""
    quantized = list(study.means("kv_dtype_loss_change"))
    if not quantized:
        return []
    trained = {levels: _list_trained_formats(study, levels) for levels in quantized}
    is_aware = any(formats != {_EXACT} for formats in trained.values())
    text = (
        "Where K and V are kept in another dtype than the model's, the same text is decoded once"
        " more through a cache that differs in the dtype alone. So the columns do not contain the"
        " cost of a tie. The logit error is over every logit of that text."
    )
    if is_aware:
        text += (
            " A cell whose training rounded K and V, too, is compared with exact ones, which its"
            " weights were not trained with. What such a training gains is the difference between"
            " the served losses of two cells."
        )
    columns = (
        Column("cell"),
        Column("kept as"),
        *([Column("trained with")] if is_aware else []),
        Column("logit error, rms (nats)", True),
        Column("largest", True, "logit error", ("logit error, largest (nats)",)),
        mean_column("loss change (nats/token)"),
    )
    rows = tuple(
        _kv_dtype_row(study, levels, trained[levels] if is_aware else None) for levels in quantized
    )
    caption = "Cells by the dtype of their cache, against the model's dtype; mean over seeds."
    return [
        Heading("The cache's dtype"),
        paragraph(text),
        Table("kv-dtype", caption, columns, rows),
    ]


def _kv_dtype_row(study: Study, levels: Levels, trained: set[str] | None) -> Row:
    rows = (row for row in study.cells[levels].values() if row.is_done)
    dtypes = {_describe_format(row.record["experiment"]["serving"]) for row in rows}
    changes = list(study.values(levels, "kv_dtype_loss_change").values())
    mean_and_sd = mean_and_spread(changes)
    change = Cell(_format_small(changes), mean_and_sd[0], csv=mean_and_sd)
    errors = (_mean_cell(study, levels, f"kv_dtype_logit_{name}") for name in ("rms", "largest"))
    formats = [dtypes] if trained is None else [dtypes, trained]
    kept = (cell(", ".join(sorted(names))) for names in formats)
    return Row((cell(study.label(levels)), *kept, *errors, change), study.cell_key(levels))


_EXACT = "exact K and V"


def _list_trained_formats(study: Study, levels: Levels) -> set[str]:
    """Return how the forward passes of a cell's trainings read K and V, in words."""
    recipes = [
        row.record["experiment"].get("training", {})
        for row in study.cells[levels].values()
        if row.is_done
    ]
    return {
        _EXACT if recipe.get("kv_dtype", "model") == "model" else _describe_format(recipe)
        for recipe in recipes
    }


def _describe_format(section: Mapping[str, Any]) -> str:
    """Return the storage that ``training`` or ``serving`` of an experiment names, in words."""
    group, residual = section.get("kv_group"), section.get("kv_residual")
    groups = f", groups of {group}" if group else ""
    newest = "" if residual is None else f", newest {residual} in full"
    return f"{section['kv_dtype']}{groups}{newest}"


def _eviction_contents(study: Study) -> list[Content]:
    """Report what eviction dropped, if cells evict."""
    evicting = list(study.means("evicted_share"))
    if not evicting:
        return []
    text = (
        "Global layers of these cells keep a fixed number of tokens, by snapkv of the prompt and"
        " all that follow it. Dropped is the share of the"
        " tokens up to a query that it can no longer attend to, over all queries of the served"
        " text. Keys keep the rotation of their own position."
    )
    rows = []
    for levels in evicting:
        done = (row for row in study.cells[levels].values() if row.is_done)
        kept = {_describe_eviction(row.record["experiment"]["serving"]) for row in done}
        texts = cell(study.label(levels)), cell(", ".join(sorted(kept)))
        share = 100 * (study.mean(levels, "evicted_share") or 0.0)
        rows.append(Row((*texts, cell(f"{share:.1f}", share)), study.cell_key(levels)))
    columns = (Column("cell"), Column("keeps"), Column("dropped (%)", True))
    caption = "Cells by the tokens that their cache keeps; mean over seeds."
    return [
        Heading("Eviction"),
        paragraph(text),
        Table("eviction", caption, columns, tuple(rows)),
    ]


def _describe_eviction(serving: Mapping[str, Any]) -> str:
    evict = serving.get("evict") or {}
    budget = f"{evict['keep']:,} tokens" if evict.get("keep") else f"{evict['bytes']:,} bytes"
    names = ("prompt", "sinks", "recent", "pool")
    given = (f"{name} {evict[name]}" for name in names if evict.get(name) is not None)
    return ", ".join([f"{budget} by {evict['by'].replace('_', ' ')}", *given])


def _format_small(values: list[float]) -> str:
    """Format mean and standard deviation with significant digits: four decimals show too little."""
    mean, spread = mean_and_spread(values)
    text = f"{'+' if mean > 0 else ''}{format_significant(mean, 2)}"
    return text if spread is None else f"{text} {PLUS_MINUS} {format_significant(spread, 2)}"


def _mean_cell_with_csv_spread(study: Study, levels: Levels, metric: str) -> Cell:
    """Return a cell that shows the mean; the CSV has its standard deviation too."""
    values = list(study.values(levels, metric).values())
    mean = _mean_cell(study, levels, metric)
    return replace(mean, csv=mean_and_spread(values)) if values else mean


def _mean_cell(study: Study, levels: Levels, metric: str) -> Cell:
    mean = study.mean(levels, metric)
    return EMPTY_CELL if mean is None else cell(format_metric(metric, mean), mean)
