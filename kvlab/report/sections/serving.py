"""Serving gap: how decoding through the serving cache changes the loss, and what caches drop."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.serving_divergence import serving_divergence
from kvlab.report.table_rows import Entries, cells_table, number_cell, spread_cell

_EXACT = "exact K and V"


def report_serving_gap(study: Study) -> doc.Section | None:
    """List the cells whose served loss differs from their one-shot loss."""
    gaps = study.means("serving_gap")
    if not gaps:
        return None
    with_gap = [levels for levels in gaps if abs(gaps[levels]) >= GAP_ROUNDING]
    spans: list[doc.Span] = [
        "The serving gap is the loss of the same weights on the same text through the serving"
        " cache, minus their one-shot loss. "
    ]
    n_cells = format_count(len(gaps), "cell")
    if with_gap:
        largest = max(with_gap, key=lambda levels: study.serving_gaps[levels].value)
        size = fmt.format_difference("serving_gap", study.serving_gaps[largest].value)
        spans.append(f"It is in {len(with_gap):,} of {n_cells}; the largest is that of ")
        spans += [doc.Strong(study.label(largest)), f", {size}."]
    else:
        spans.append(f"None of {n_cells} has one beyond rounding ({GAP_ROUNDING:g} nats).")
    if any(_trained_formats(study, levels) != {_EXACT} for levels in gaps):
        spans.append(" " + texts.fill("trained formats"))
    contents: list[doc.Content] = [doc.paragraph(*spans)]
    if with_gap:
        caption = "Cells whose serving cache changes the loss beyond rounding."
        entries = partial(_gap_entries, study)
        contents.append(cells_table(study, "serving-gap", caption, entries, with_gap))
    contents += serving_divergence(study)
    contents += _report_cache_dtype(study)
    contents += _report_eviction(study)
    return doc.Section("Serving gap", tuple(contents))


def _gap_entries(study: Study, levels: Levels) -> Entries:
    metric = "serving_gap"
    gaps, test = list(study.values(levels, metric).values()), study.serving_gaps[levels]
    yield "n", len(gaps)
    for title, name in (("one-shot loss", "loss_paired"), ("served loss", "loss_served")):
        losses = list(study.values(levels, name).values())
        loss = spread_cell(losses, partial(fmt.format_metric, name))
        yield cols.mean_column(title, "nats/token"), loss
    gap = spread_cell(
        gaps, partial(fmt.format_difference, metric), partial(fmt.format_metric, metric)
    )
    yield cols.mean_column("gap (nats/token)"), gap
    heads = ("smallest gap (nats/token)", "largest gap (nats/token)")
    ends = cols.range_cell(metric, min(gaps), max(gaps)) if len(gaps) > 1 else doc.EMPTY_CELL
    yield doc.Column("smallest and largest", True, "gap over seeds", heads), ends
    column = cols.simultaneous_column(metric, study.decide.alpha, "over trainings, for all cells")
    is_tested = test.interval is not None
    interval = doc.EMPTY_CELL if test.interval is None else cols.range_cell(metric, *test.interval)
    yield column, interval
    p = number_cell(test.p if is_tested else None, fmt.format_p_value)
    yield "p", p, "corrected for all cells"
    verdict = doc.cell("within noise" if is_tested else "not tested", tone="muted")
    if test.is_found:
        is_worse = test.value > 0
        verdict = doc.cell("worse" if is_worse else "better", tone="bad" if is_worse else "good")
    yield "verdict", verdict


def _list_sections(study: Study, levels: Levels, name: str) -> list[Mapping[str, Any]]:
    """Return a section of the experiments of a cell's finished trials."""
    rows = (row for row in study.cells[levels].values() if row.is_done)
    return [row.record["experiment"].get(name, {}) for row in rows]


def _trained_formats(study: Study, levels: Levels) -> set[str]:
    """Return how the forward passes of a cell's trainings read K and V, in words."""
    return {
        _EXACT if recipe.get("kv_dtype", "model") == "model" else _describe_format(recipe)
        for recipe in _list_sections(study, levels, "training")
    }


def _describe_format(section: Mapping[str, Any]) -> str:
    """Return the storage that ``training`` or ``serving`` of an experiment names, in words."""
    group, residual = section.get("kv_group"), section.get("kv_residual")
    groups = f", groups of {group}" if group else ""
    newest = "" if residual is None else f", newest {residual} in full"
    return f"{section['kv_dtype']}{groups}{newest}"


def _report_cache_dtype(study: Study) -> list[doc.Content]:
    """Report what storing K and V in another dtype costs, if cells do."""
    quantized = list(study.means("kv_dtype_loss_change"))
    if not quantized:
        return []
    is_aware = any(_trained_formats(study, levels) != {_EXACT} for levels in quantized)
    text = texts.fill("dtype of the cache")
    if is_aware:
        text += " " + texts.fill("dtype of the cache where training rounded")

    def show_change(change: float) -> str:  # four decimals show too little
        return f"{'+' if change > 0 else ''}{fmt.format_significant(change, 2)}"

    def entries(levels: Levels) -> Entries:
        kept = {_describe_format(one) for one in _list_sections(study, levels, "serving")}
        yield "kept as", ", ".join(sorted(kept))
        if is_aware:
            trained = ", ".join(sorted(_trained_formats(study, levels)))
            yield "trained with", trained
        rms, largest = (
            number_cell(study.mean(levels, name), partial(fmt.format_metric, name))
            for name in ("kv_dtype_logit_rms", "kv_dtype_logit_largest")
        )
        yield "logit error, rms (nats)", rms
        heads = ("logit error, largest (nats)",)
        yield doc.Column("largest", True, "logit error", heads), largest
        changes = list(study.values(levels, "kv_dtype_loss_change").values())
        change = spread_cell(changes, show_change, partial(fmt.format_significant, digits=2))
        yield cols.mean_column("loss change (nats/token)"), change

    caption = "Cells by the dtype of their cache, against the model's dtype; mean over seeds."
    table = cells_table(study, "kv-dtype", caption, entries, quantized)
    return [doc.Heading("The cache's dtype"), doc.paragraph(text), table]


def _report_eviction(study: Study) -> list[doc.Content]:
    """Report what eviction dropped, if cells evict."""
    evicting = list(study.means("evicted_share"))
    if not evicting:
        return []

    def entries(levels: Levels) -> Entries:
        kept = {_describe_eviction(one) for one in _list_sections(study, levels, "serving")}
        yield "keeps", ", ".join(sorted(kept))
        share = 100 * (study.mean(levels, "evicted_share") or 0.0)
        yield "dropped (%)", doc.cell(f"{share:.1f}", share)

    caption = "Cells by the tokens that their cache keeps; mean over seeds."
    table = cells_table(study, "eviction", caption, entries, evicting)
    return [doc.Heading("Eviction"), doc.paragraph(texts.fill("eviction")), table]


def _describe_eviction(serving: Mapping[str, Any]) -> str:
    evict = serving.get("evict") or {}
    budget = f"{evict['keep']:,} tokens" if evict.get("keep") else f"{evict['bytes']:,} bytes"
    names = ("prompt", "sinks", "recent", "pool")
    given = (f"{name} {evict[name]}" for name in names if evict.get(name) is not None)
    return ", ".join([f"{budget} by {evict['by'].replace('_', ' ')}", *given])
