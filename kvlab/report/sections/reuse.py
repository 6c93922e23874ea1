"""Reuse between turns: hit rates by budget and turn, what they save, and what reuse changes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.benchmark_lines import cell_lines
from kvlab.report.benchmark_plots import reuse_figures

SMALLEST_CHANGE = 1e-7
"""Nats per token. Below, codes or bfloat16 values differ by the rounding of other products."""

MAX_DRAWN = 2 * len(doc.SERIES)
"""Cells in one figure. Equal curves share a line, so there are more than colours."""

_COLUMNS = {
    "reuse_hit_rate": ("hit rate (%)", "tokens of prompts whose K/V an earlier turn had left"),
    "reuse_flops_saved": ("FLOPs saved (%)", "of the FLOPs of all prompts"),
    "reuse_warm_ttft_ms": ("warm (ms)", "to the first token of prompts with a hit, K/V restored"),
    "reuse_cold_ttft_ms": ("cold (ms)", "of the same prompts, computed whole"),
    "reuse_ttft_ratio": ("warm/cold", ""),
    "serving_gap": ("serving gap (nats/token)", ""),
    "reuse_gap": ("reuse gap (nats/token)", ""),
    "reuse_kl": ("KL(cold || warm) (nats/token)", ""),
}
"""Metric -> head and hint."""


def report_reuse(study: Study) -> doc.Section | None:
    """Report what every cell's prefix cache reuses between the turns of conversations."""
    rates = study.means("reuse_hit_rate")
    if not rates:
        return None
    lines = {levels: cell_lines(study, levels) for levels in rates}
    configs = [
        (row.record["experiment"].get("benchmark") or {}).get("conversations") or {}
        for row in study.done_rows
    ]
    budgets = {config.get("budget") for config in configs}
    sizes = [*map(fmt.format_binary_size, sorted(size for size in budgets if size is not None))]
    names = " or ".join([*sizes, *(["no limit"] if None in budgets else [])])
    budget = f"a prefix cache of {names}" if sizes else "room for everything"
    drawn = sorted(lines, key=study.n_changed_factors)[:MAX_DRAWN]
    keys = {study.label(levels): study.cell_key(levels) for levels in drawn}
    drawn_lines = [line for levels in drawn for line in lines[levels]]
    caption = texts.fill("caption of reuse", budget=budget, sign=fmt.PLUS_MINUS)
    snapshots = sorted({config["snapshot_tokens"] for config in configs if config})
    method = texts.fill("reuse", snapshots=" or ".join(f"{value:,}" for value in snapshots))
    contents: list[doc.Content] = [
        doc.paragraph(*_summarize(study, rates, budget)),
        *reuse_figures(drawn_lines, keys, f", with {budget}"),
        cols.cells_table(study, "reuse", caption, partial(_reuse_entries, study), rates),
        *_budget_table(study, lines),
        doc.Fold("How reuse is measured", (doc.paragraph(method),)),
    ]
    return doc.Section("Reuse between turns", tuple(contents))


def _summarize(study: Study, rates: Mapping[Levels, float], budget: str) -> Iterator[doc.Span]:
    yield (
        "Each turn's prompt is the conversation so far and a new part, so a cache that keeps the"
        " K/V of earlier turns need not compute them again. "
    )
    exact, requests = study.means("reuse_hit_rate_exact"), study.means("reuse_requests")
    if exact and requests:
        count = format_count(round(max(requests.values())), "request")
        share = fmt.format_metric("reuse_hit_rate_exact", max(exact.values()))
        yield f"Of the prompts of {count}, {share}% is in an earlier turn: the upper bound. "
    order = sorted(rates, key=lambda levels: rates[levels])
    least, most = (fmt.format_metric("reuse_hit_rate", rates[order[end]]) for end in (0, -1))
    if least == most:
        yield f"With {budget}, every cell finds {most}%."
    else:
        yield f"With {budget}, "
        yield doc.Strong(study.label(order[-1]))
        yield f" finds most, {most}%, and "
        yield doc.Strong(study.label(order[0]))
        yield f" finds least, {least}%."
    changes = study.means("reuse_kl")
    changed = [levels for levels in changes if changes[levels] >= SMALLEST_CHANGE]
    if changed:
        yield " Reuse changes the replies of "
        yield doc.Strong(cols.join_names([study.label(levels) for levels in changed]))
        largest = fmt.format_metric("reuse_kl", max(changes[levels] for levels in changed))
        rest = "" if len(changed) == len(changes) else "; of the others it changes rounding alone"
        yield f", by up to {largest} nats/token of KL(cold || warm){rest}."
    elif changes:
        yield " Reuse changes no cell's replies beyond rounding."


def _reuse_entries(study: Study, levels: Levels) -> doc.Entries:
    for metric, (head, hint) in _COLUMNS.items():
        if metric not in study.measured_metrics:
            continue
        values = list(study.values(levels, metric).values())
        show = fmt.format_difference if metric.endswith("_gap") else fmt.format_metric
        cell = cols.spread_cell(metric, values, show)
        if len(set(values)) == 1:  # most are the load's alone, the same at every seed
            cell = replace(cell, text=show(metric, values[0]))
        yield cols.mean_column(head, fmt.display_unit(metric), hint), cell


def _budget_table(
    study: Study, lines: Mapping[Levels, Sequence[Mapping[str, Any]]]
) -> Iterator[doc.Table]:
    """Yield the table of what fits and what is found at the budgets that all cells have."""

    def by_budget(levels: Levels, metric: str) -> dict[int, float]:  # without those of no limit
        return {
            line["budget_bytes"]: line["value"]
            for line in lines[levels]
            if line["metric"] == metric and line.get("budget_bytes")
        }

    common = sorted(set.intersection(*(set(by_budget(c, "budget_hit_rate")) for c in lines)))
    if not common:
        return

    def entries(levels: Levels) -> doc.Entries:
        each = study.mean(levels, "reuse_conversation_bytes")
        column = cols.size_column("a conversation", "K/V of a conversation at its end")
        yield column, cols.size_cell(round(each) if each else None)
        rates, fits = (
            by_budget(levels, f"budget_{name}") for name in ("hit_rate", "conversations")
        )
        for budget in common:
            fit, hit = round(fits[budget]), 100 * rates[budget]
            heads = f"hit rate in {budget:,} B (%)", f"conversations that fit {budget:,} B"
            text = f"{fmt.format_fixed(hit, 2)} ({fit:,})"
            column = doc.Column(fmt.format_binary_size(budget), True, "", heads)
            yield column, doc.Cell(text, hit, csv=(hit, fit))

    yield cols.cells_table(study, "reuse-budgets", texts.fill("caption of budgets"), entries, lines)
