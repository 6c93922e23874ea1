"""Measurements of a benchmark as tables for the terminal: a row a variant and place."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvlab.benchmark.measurement import Measurement
from kvlab.cli.terminal import format_table
from kvlab.humanize import format_number


@dataclass(frozen=True)
class TableLayout:
    """How one part is shown.

    Attributes:
        place: the fields of a measurement that make a row, besides the variant.
        columns: metric -> head. ``:again`` is without a cache, ``:p95`` a quantile.
    """

    title: str
    place: tuple[str, ...]
    columns: dict[str, str]


TABLE_LAYOUTS: dict[str, tuple[TableLayout, ...]] = {
    "memory": (
        TableLayout("KV bytes at batch 1 and the block size", ("context_length",), {
            "kv_formula": "formula", "kv_storage": "storages", "kv_requested": "asked of CUDA",
            "kv_allocated": "allocated", "kv_read": "read/token",
        }),
        TableLayout("peak at batch 1", ("context_length", "cached"), {
            "peak": "peak", "peak_weights": "weights", "peak_cache": "cache",
            "peak_logits": "logits", "peak_activations": "activations",
        }),
    ),
    "latency": (
        TableLayout("latency at batch 1", ("prompt_tokens",), {
            "ttft": "first token", "ttft:p95": "p95", "tpot": "a token", "tpot:p95": "p95",
            "tpot:p99": "p99", "tpot:again": "no cache", "tpot_ratio": "of the first",
        }),
    ),
    "throughput": (
        TableLayout("throughput", ("prompt_tokens", "batch_size"), {
            "tokens_per_second": "tokens/s", "tpot_ratio": "a token, of the first",
        }),
    ),
    "task": (
        TableLayout("256 tokens of Moby Dick + 256 sampled", ("batch_size", "cached"), {
            "tasks_per_second": "tasks/s", "best_tasks_per_second": "best",
            "task_ratio": "time of the first's",
        }),
    ),
    "limit": (
        TableLayout("largest batch", ("context_length",), {
            "largest_batch": "tried", "largest_batch_formula": "room beside weights",
        }),
    ),
    "roofline": (
        TableLayout("ceilings", (), {
            "bandwidth": "bytes/s", "product_bandwidth": "in products", "matrix_rate": "FLOP/s",
        }),
        TableLayout("a decode step beside the roofline", ("batch_size", "context_length"), {
            "step_flops": "FLOPs", "step_weight_bytes": "weights",
            "step_kv_read_bytes": "K/V read", "step_kv_written_bytes": "written",
            "step_predicted": "predicted", "step_measured": "measured", "mbu": "MBU", "mfu": "MFU",
        }),
        TableLayout("where a layout saves a tenth of the first's step", (), {
            "break_even_context": "context, batch 1", "break_even_batch": "batch, block size",
        }),
    ),
    "energy": (
        TableLayout("energy", ("batch_size",), {
            "joules_per_token": "J/token", "joules_ratio": "of the first's",
        }),
    ),
    "projection": (
        TableLayout("the same layouts elsewhere", ("against", "context_length", "batch_size"), {
            "projected_kv_stored": "KV stored", "projected_kv_read": "KV read/token",
            "projected_weights": "weights", "projected_step": "step",
        }),
    ),
}  # fmt: skip

MAX_NOTES = 3
"""Reasons for noise that are printed; all are in the JSON lines."""

FIELD_HEADERS = {
    "context_length": "context", "prompt_tokens": "prompt", "batch_size": "batch",
    "cached": "cache", "against": "size",
}  # fmt: skip


def format_tables(part: str, lines: Sequence[Measurement]) -> Iterator[str]:
    """The part's tables, then its notes, each once."""
    if part == "articles":
        yield from _format_articles(lines)
        return
    for form in TABLE_LAYOUTS[part]:
        text = _format_table(form, lines)
        if text:
            yield text
    notes = dict.fromkeys(line.note for line in lines if line.noisy and line.note)
    if notes:
        more = f"\n  and {len(notes) - MAX_NOTES} more" if len(notes) > MAX_NOTES else ""
        yield "! noisy, do not quote: " + "\n  ".join(list(notes)[:MAX_NOTES]) + more


def _format_table(form: TableLayout, lines: Iterable[Measurement]) -> str:
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        for name, text in _line_cells(line):
            if name in form.columns:
                place = tuple(_format_field(getattr(line, field)) for field in form.place)
                rows.setdefault((line.variant, *place), {})[name] = text
    shown = [name for name in form.columns if any(name in row for row in rows.values())]
    if not shown:
        return ""
    head = [
        *(FIELD_HEADERS[field] for field in form.place),
        *(form.columns[name] for name in shown),
    ]
    body = [
        [*place, *(row.get(name, "-") for name in shown), variant]
        for (variant, *place), row in rows.items()
    ]
    return f"{form.title}\n{format_table([[*head, 'what'], *body], 'r' * len(head))}"


def _line_cells(line: Measurement) -> Iterator[tuple[str, str]]:
    name = line.metric
    if line.metric == "tpot" and not line.cached:
        name = "tpot:again"
    yield name, _format_value(line)
    for quantile in line.quantiles:
        yield f"{name}:p{quantile.q * 100:.0f}", _format_quantity(quantile.value, line.unit)


def _format_value(line: Measurement) -> str:
    if line.value is None:
        return "never"
    text = _format_quantity(line.value, line.unit)
    if line.metric in ("mbu", "mfu", "efficiency"):
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


def _format_articles(lines: Iterable[Measurement]) -> Iterator[str]:
    yield "the articles, and what is exact"
    for line in lines:
        said = (line.against or "").removeprefix("the article's ")
        yield f"  {line.variant}: {line.value:,} {line.unit}; printed: {said}\n    {line.note}"
