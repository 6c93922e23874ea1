"""The report's section of reuse: hit rates by budget and turn, what they save and change."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_bytes
from kvlab.report import benchmark_plots as plots
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts

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
    lines = {levels: plots.cell_lines(study, levels) for levels in rates}
    configs = [
        (row.record["experiment"].get("benchmark") or {}).get("conversations") or {}
        for row in study.done_rows
    ]
    budgets = {config.get("budget") for config in configs}
    sizes = [*map(format_bytes, sorted(size for size in budgets if size is not None))]
    names = " or ".join([*sizes, *(["no limit"] if None in budgets else [])])
    budget = f"a prefix cache of {names}" if sizes else "room for everything"
    drawn = sorted(lines, key=study.n_changed_factors)[:MAX_DRAWN]
    keys = {study.label(levels): study.cell_key(levels) for levels in drawn}
    drawn_lines = [line for levels in drawn for line in lines[levels]]
    caption = texts.fill("caption of reuse", budget=budget)
    snapshots = sorted({config["snapshot_tokens"] for config in configs if config})
    method = texts.fill("reuse", snapshots=" or ".join(f"{value:,}" for value in snapshots))
    contents: list[doc.Content] = [
        _summarize(study, rates, budget),
        *draw_reuse(drawn_lines, keys, f", with {budget}"),
        cols.cells_table(study, "reuse", caption, partial(_reuse_entries, study), rates),
        *_budget_table(study, lines),
        doc.Fold("How reuse is measured", (doc.paragraph(method),)),
    ]
    return doc.Section("Reuse between turns", tuple(contents))


def _summarize(study: Study, rates: Mapping[Levels, float], budget: str) -> doc.Paragraph:
    exact, requests = study.means("reuse_hit_rate_exact"), study.means("reuse_requests")
    order, changes = sorted(rates, key=lambda levels: rates[levels]), study.means("reuse_kl")
    changed = [levels for levels in changes if changes[levels] >= SMALLEST_CHANGE]
    fields = {
        "exact": max(exact.values(), default=None),
        "requests": round(max(requests.values(), default=0)),
        "ends": [(study.label(c), fmt.format_metric("reuse_hit_rate", rates[c])) for c in order],
        "changes": changes,
        "changed": changed,
        "names": cols.join_names([study.label(levels) for levels in changed]),
    }
    return texts.write("turns", budget=budget, **fields)


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
        rates, fits = (by_budget(levels, f"budget_{n}") for n in ("hit_rate", "conversations"))
        for budget in common:
            fit, hit = round(fits[budget]), 100 * rates[budget]
            heads = f"hit rate in {budget:,} B (%)", f"conversations that fit {budget:,} B"
            text = f"{fmt.format_fixed(hit, 2)} ({fit:,})"
            column = doc.Column(format_bytes(budget), True, "", heads)
            yield column, doc.Cell(text, hit, csv=(hit, fit))

    yield cols.cells_table(study, "reuse-budgets", texts.fill("caption of budgets"), entries, lines)


def draw_reuse(
    lines: plots.Lines, keys: Mapping[str, str], set_up: str = ""
) -> Iterator[doc.Figure]:
    """Yield the hit rate of prefix caches by their bytes, and by turn, beside the upper bound.

    Args:
        lines: see `kvlab.report.benchmark_plots.benchmark_figures`.
        keys: see `kvlab.report.benchmark_plots.benchmark_figures`.
        set_up: at which budget the turns were measured, as a part of the caption.
    """
    lines = list(lines)

    def collect(metric: str, field: str) -> dict[str, dict[int, float]]:
        """Return the values of a metric by variant and by a field of the lines."""
        curves: dict[str, dict[int, float]] = {}
        for line in lines:
            if line["metric"] == metric and line.get(field):
                curves.setdefault(line["variant"], {})[line[field]] = line["value"]
        return curves

    budgets, turns = collect("budget_hit_rate", "budget_bytes"), collect("turn_hit_rate", "turn")
    sizes = sorted({size for curve in budgets.values() for size in curve})
    bound = next((line["value"] for line in lines if line["metric"] == "hit_rate_exact"), None)
    if len(sizes) > 1:
        limit = {} if bound is None else {sizes[0]: bound, sizes[-1]: bound}
        x, caption = doc.Axis("prefix cache (bytes)", "bytes"), "Hit rate against the bytes of the"
        yield _draw_rates("reuse-budgets", budgets, limit, x, f"{caption} prefix cache.", keys)
    if len({turn for curve in turns.values() for turn in curve}) > 1:
        limit = next(iter(collect("turn_hit_rate_exact", "turn").values()), {})
        x, caption = doc.Axis("turn of the conversation"), f"Hit rate by turn{set_up}."
        yield _draw_rates("reuse-turns", turns, limit, x, caption, keys)


def _draw_rates(
    name: str,
    curves: Mapping[str, Mapping[int, float]],
    limit: Mapping[int, float],
    x_axis: doc.Axis,
    caption: str,
    keys: Mapping[str, str],
) -> doc.Figure:
    """Plot hit rates; variants of equal curves share a line."""
    equal: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for variant, curve in curves.items():
        equal.setdefault(tuple(sorted(curve.items())), []).append(variant)

    def draw(points: Iterable[tuple[int, float]], label: str, key: str = "") -> Iterator[doc.Point]:
        for x, share in points:
            place = format_bytes(x) if x_axis.kind == "bytes" else f"turn {x}"
            tip = (label, place, f"{100 * share:.2f}% of prompts")
            yield doc.Point(float(x), 100 * share, tip, key)

    layers = []
    for number, (points, variants) in enumerate(list(equal.items())[: len(doc.SERIES)]):
        drawn = tuple(draw(points, ", ".join(variants), keys.get(variants[0], "")))
        layers.append(doc.draw_series(number, ", ".join(variants), drawn))
    if limit:
        title = "upper bound: any earlier turn"
        drawn = tuple(draw(sorted(limit.items()), title))
        layers.append(doc.Line(title, drawn, "muted", "dashed"))
    plot = doc.Plot(x_axis, doc.Axis("prompt tokens found (%)"), tuple(layers))
    return doc.Figure(name, caption, f"{caption} {plots.name_ends(layers, '%')}.", plot)
