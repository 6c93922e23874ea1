"""Format the measurements of a benchmark as tables for the terminal."""

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module

from kvlab.benchmark.measurement import Measurement, TableLayout
from kvlab.cli.terminal import format_table
from kvlab.humanize import format_number
from kvlab.spec.benchmark_config import MEASURES

MAX_NOTES = 3
"""Reasons for noise that are printed; all are in the JSON lines."""

FIELD_HEADERS = {
    "context_length": "context", "prompt_tokens": "prompt", "batch_size": "batch",
    "cached": "cache", "against": "size", "budget_bytes": "bytes",
}  # fmt: skip


_SHARES = ("hit_rate", "hit_rate_exact", "flops_saved", "top_changed")
"""Ends of metrics that are printed in percent."""


def format_tables(name: str, lines: Sequence[Measurement]) -> Iterator[str]:
    """Yield the tables of the measure ``name``, then its notes, each once.

    A measure without tables is a list of claims, each beside the exact number.
    """
    layouts: tuple[TableLayout, ...] = import_module(MEASURES[name].module).TABLES
    if not layouts:
        yield from _format_claims(lines)
        return
    for layout in layouts:
        text = _format_layout(layout, lines)
        if text:
            yield text
    notes = dict.fromkeys(line.note for line in lines if line.noisy and line.note)
    if notes:
        more = f"\n  and {len(notes) - MAX_NOTES} more" if len(notes) > MAX_NOTES else ""
        yield "! noisy, do not quote: " + "\n  ".join(list(notes)[:MAX_NOTES]) + more


def _format_layout(layout: TableLayout, lines: Iterable[Measurement]) -> str:
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        for name, text in _format_line(line):
            if name in layout.columns:
                keys = tuple(_format_field(getattr(line, field)) for field in layout.keys)
                rows.setdefault((line.variant, *keys), {})[name] = text
    shown = [name for name in layout.columns if any(name in row for row in rows.values())]
    if not shown:
        return ""
    key_headers = [FIELD_HEADERS.get(field, field) for field in layout.keys]
    header = [*key_headers, *(layout.columns[name] for name in shown)]
    body = [
        [*keys, *(row.get(name, "-") for name in shown), variant]
        for (variant, *keys), row in rows.items()
    ]
    return f"{layout.title}\n{format_table([[*header, 'what'], *body], 'r' * len(header))}"


def _format_line(line: Measurement) -> Iterator[tuple[str, str]]:
    name = line.metric
    if line.metric == "tpot" and not line.cached:
        name = "tpot:uncached"
    yield name, _format_value(line)
    for quantile in line.quantiles:
        yield f"{name}:p{quantile.q * 100:.0f}", _format_quantity(quantile.value, line.unit)


def _format_value(line: Measurement) -> str:
    if line.value is None:
        return "never"
    text = _format_quantity(line.value, line.unit)
    if line.metric in ("mbu", "mfu", "efficiency") or line.metric.endswith(_SHARES):
        text = f"{line.value:.1%}"
    elif line.metric.endswith("_ratio") and line.low is not None and line.high is not None:
        text = f"{line.value:.2f} [{line.low:.2f}, {line.high:.2f}] {_format_verdict(line)}"
    elif line.metric == "projected_step" and line.low is not None and line.high is not None:
        text = f"{_format_quantity(line.low, 's')} to {_format_quantity(line.high, 's')}"
    elif line.metric == "step_predicted":
        text += f" ({line.verdict})"
    elif line.relative_error is not None:
        text += f" \N{PLUS-MINUS SIGN}{line.relative_error:.0%}"
    return text + ("!" if line.noisy else "")


def _format_verdict(line: Measurement) -> str:
    if line.verdict == "undecided" and line.least_found is not None:
        return f"not told apart (would have found {line.least_found:.0%})"
    return line.verdict or line.note


def _format_quantity(value: float, unit: str) -> str:
    if unit == "s":
        if value < 1:
            return f"{value * 1000:.3g} ms"
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    if unit == "bytes":
        return f"{value:,.0f}" if value < 10**7 else format_number(value, "B")
    if unit in ("tokens", "sequences"):
        return f"{value:,.0f}"
    return format_number(value)


def _format_field(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _format_claims(lines: Iterable[Measurement]) -> Iterator[str]:
    yield "the articles, and what is exact"
    for line in lines:
        printed = (line.against or "").removeprefix("the article's ")
        yield f"  {line.variant}: {line.value:,} {line.unit}; printed: {printed}\n    {line.note}"
