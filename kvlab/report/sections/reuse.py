"""Reuse between turns: hit rates by budget and turn, what they save, and what reuse changes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.benchmark_lines import cell_lines
from kvlab.report.benchmark_plots import reuse_figures
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Figure,
    Fold,
    Row,
    Section,
    Span,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.figures.plot import SERIES
from kvlab.report.formatting import (
    PLUS_MINUS,
    display_unit,
    format_binary_size,
    format_difference,
    format_fixed,
    format_metric,
)
from kvlab.report.table_columns import (
    join_names,
    mean_and_spread,
    mean_cell,
    mean_column,
    size_cell,
    size_column,
)

Lines = Sequence[Mapping[str, Any]]

_HEADS = {
    "reuse_hit_rate": "hit rate (%)",
    "reuse_flops_saved": "FLOPs saved (%)",
    "reuse_warm_ttft_ms": "warm (ms)",
    "reuse_cold_ttft_ms": "cold (ms)",
    "reuse_ttft_ratio": "warm/cold",
}
_HINTS = {
    "reuse_hit_rate": "tokens of prompts whose K/V an earlier turn had left, of all",
    "reuse_flops_saved": "of the FLOPs of all prompts",
    "reuse_warm_ttft_ms": "time to first token of the prompts with a hit, K/V restored",
    "reuse_cold_ttft_ms": "of the same prompts, computed whole",
}
SMALLEST_CHANGE = 1e-7
"""Nats per token. Below, codes or bfloat16 values differ by the rounding of other products."""

MAX_DRAWN = 2 * len(SERIES)
"""Cells in one figure."""

_GAPS = {"serving_gap": "serving gap (nats/token)", "reuse_gap": "reuse gap (nats/token)"}


def report_reuse(study: Study) -> Section | None:
    """Report what every cell's prefix cache reuses between the turns of conversations."""
    rates = study.means("reuse_hit_rate")
    if not rates:
        return None
    lines = {levels: cell_lines(study, levels) for levels in rates}
    contents: list[Content] = [
        paragraph(*_summarize(study, rates)),
        *_figures(study, lines),
        _table(study, rates),
        *_budget_table(study, lines),
        Fold("How reuse is measured", (paragraph(_explain(study)),)),
    ]
    return Section("Reuse between turns", tuple(contents))


def _summarize(study: Study, rates: Mapping[Levels, float]) -> list[Span]:
    exact = study.means("reuse_hit_rate_exact")
    requests = study.means("reuse_requests")
    budget = _describe_budget(study)
    spans: list[Span] = [
        "Each turn's prompt is the conversation so far and a new part, so a cache that keeps the"
        " K/V of earlier turns need not compute them again. "
    ]
    if exact and requests:
        count = format_count(round(max(requests.values())), "request")
        share = format_metric("reuse_hit_rate_exact", max(exact.values()))
        spans.append(
            f"Of the prompts of {count}, {share}% is in an earlier turn: the upper bound. "
        )
    spans += [*_describe_rates(study, rates, budget), *_describe_changes(study)]
    return spans


def _describe_rates(study: Study, rates: Mapping[Levels, float], budget: str) -> Iterator[Span]:
    best = max(rates, key=lambda levels: rates[levels])
    least = min(rates, key=lambda levels: rates[levels])
    if rates[best] - rates[least] < 5e-5:
        yield f"With {budget}, every cell finds {format_metric('reuse_hit_rate', rates[best])}%."
        return
    for levels, word in ((best, "most"), (least, "least")):
        share = format_metric("reuse_hit_rate", rates[levels])
        yield f"With {budget}, " if levels is best else " and "
        yield Strong(study.label(levels))
        yield f" finds {word}, {share}%{',' if levels is best else '.'}"


def _describe_changes(study: Study) -> Iterator[Span]:
    """Say which cells' replies reuse changes."""
    changes = study.means("reuse_kl")
    if not changes:
        return
    changed = [levels for levels in changes if changes[levels] >= SMALLEST_CHANGE]
    if not changed:
        yield " Reuse changes no cell's replies beyond rounding."
        return
    yield " Reuse changes the replies of "
    yield Strong(join_names([study.label(levels) for levels in changed]))
    largest = format_metric("reuse_kl", max(changes[levels] for levels in changed))
    rest = "" if len(changed) == len(changes) else "; of the others it changes rounding alone"
    yield f", by up to {largest} nats/token of KL(cold || warm){rest}."


def _describe_budget(study: Study) -> str:
    """Return in words the bytes of the prefix caches."""
    budgets = {_conversations(row.record).get("budget") for row in study.done_rows}
    sizes = sorted(budget for budget in budgets if budget is not None)
    if not sizes:
        return "room for everything"
    names = [*map(format_binary_size, sizes), *(["no limit"] if None in budgets else [])]
    return f"a prefix cache of {' or '.join(names)}"


def _conversations(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return (record["experiment"].get("benchmark") or {}).get("conversations") or {}


# Tables


def _table(study: Study, rates: Mapping[Levels, float]) -> Table:
    shown = [name for name in _HEADS if name in study.measured_metrics]
    gaps = [name for name in _GAPS if name in study.measured_metrics]
    changes = [name for name in ("reuse_kl",) if name in study.measured_metrics]
    columns = (
        Column("cell"),
        *(mean_column(_HEADS[name], display_unit(name), _HINTS.get(name, "")) for name in shown),
        *(mean_column(_GAPS[name]) for name in gaps),
        *(mean_column("KL(cold || warm) (nats/token)") for _ in changes),
    )
    rows = tuple(
        Row(
            (
                cell(study.label(levels)),
                *(_plain_cell(study, levels, name) for name in shown),
                *(_gap_cell(study, levels, name) for name in gaps),
                *(mean_cell(study, levels, name) for name in changes),
            ),
            study.cell_key(levels),
        )
        for levels in rates
    )
    caption = (
        f"Reuse by cell, with {_describe_budget(study)}; mean {PLUS_MINUS} standard deviation over"
        " seeds where they differ."
    )
    return Table("reuse", caption, columns, rows)


def _plain_cell(study: Study, levels: Levels, metric: str) -> Cell:
    """Return a cell's mean, with its spread only where seeds differ: most are the load's alone."""
    values = set(study.values(levels, metric).values())
    found = mean_cell(study, levels, metric)
    if len(values) != 1:
        return found
    return Cell(format_metric(metric, values.pop()), found.value, csv=found.csv)


def _gap_cell(study: Study, levels: Levels, metric: str) -> Cell:
    values = list(study.values(levels, metric).values())
    if not values:
        return EMPTY_CELL
    mean, spread = mean_and_spread(values)
    text = format_difference(metric, mean)
    if spread:
        text += f" {PLUS_MINUS} {format_metric(metric, spread)}"
    return Cell(text, mean, csv=(mean, spread))


def _budget_table(study: Study, lines: Mapping[Levels, Lines]) -> Iterator[Table]:
    """Yield the table of what fits and what is found at the budgets that all cells have."""
    curves = {levels: _by_budget(found, "budget_hit_rate") for levels, found in lines.items()}
    common = sorted(set.intersection(*(set(curve) for curve in curves.values())))
    if not common:
        return
    fits = {levels: _by_budget(found, "budget_conversations") for levels, found in lines.items()}
    columns = [Column("cell"), size_column("a conversation", "K/V of a conversation at its end")]
    for budget in common:
        heads = f"hit rate in {budget:,} B (%)", f"conversations that fit {budget:,} B"
        columns.append(Column(format_binary_size(budget), True, "", heads))
    rows = []
    for levels, curve in curves.items():
        each = study.mean(levels, "reuse_conversation_bytes")
        entries = [cell(study.label(levels)), size_cell(round(each)) if each else EMPTY_CELL]
        for budget in common:
            fit, hit = round(fits[levels][budget]), 100 * curve[budget]
            entries.append(Cell(f"{format_fixed(hit, 2)} ({fit:,})", hit, csv=(hit, fit)))
        rows.append(Row(tuple(entries), study.cell_key(levels)))
    caption = (
        "Hit rate (%) of the load in prefix caches of these sizes, and in parentheses how many"
        " conversations fit."
    )
    yield Table("reuse-budgets", caption, tuple(columns), tuple(rows))


def _by_budget(lines: Lines, metric: str) -> dict[int, float]:
    """Return a metric by budget; a cache without limits is left out."""
    return {
        line["budget_bytes"]: line["value"]
        for line in lines
        if line["metric"] == metric and line.get("budget_bytes")
    }


def _figures(study: Study, lines: Mapping[Levels, Lines]) -> Iterator[Figure]:
    """Yield the hit rate by budget and by turn, of the cells that differ least from the baseline.

    Equal curves share a line, so more cells are drawn than there are colours.
    """
    drawn = sorted(lines, key=study.n_changed_factors)[:MAX_DRAWN]
    keys = {study.label(levels): study.cell_key(levels) for levels in drawn}
    drawn_lines = [line for levels in drawn for line in lines[levels]]
    yield from reuse_figures(drawn_lines, keys, f", with {_describe_budget(study)}")


# How it is measured


def _explain(study: Study) -> str:
    configs = [c for row in study.done_rows if (c := _conversations(row.record))]
    snapshots = _list_values(config["snapshot_tokens"] for config in configs)
    return (
        "All cells serve one load. A prefix cache holds the K/V of past prompts and replies, in a"
        " radix tree over token ids, and drops what was used least recently. Layers with a window"
        f" can be continued at the ends of turns and every {snapshots} tokens. The upper bound is"
        " the longest prefix that a prompt has in common with any earlier turn. Hits, bytes and"
        " evictions are those of the cache's own bookkeeping over the whole load, at every budget."
        " Bytes of a conversation are those of its last turn's end, so that conversations that fit"
        " are the budget divided by them. Times and losses are of the first conversations of the"
        " load, served without a limit: warm, with the K/V of earlier turns restored, and cold,"
        " with the whole prompt computed again, in turn. The reuse gap is the warm loss of the"
        " replies minus the cold one. It is zero, within rounding, unless K/V depend on how a text"
        " was split into passes, as where a tie's last layer overwrites the others'."
    )


def _list_values(values: Iterable[Any]) -> str:
    return " or ".join(f"{value:,}" for value in sorted(set(values)))
