"""Speed of serving: time to first token, time per output token, throughput, and their curves."""

from kvlab.analysis.study import Study
from kvlab.humanize import format_count
from kvlab.report.benchmark_lines import benchmark_lines, describe_shared_timings
from kvlab.report.benchmark_plots import MAX_VARIANTS, benchmark_figures
from kvlab.report.document import (
    EMPTY_CELL,
    Column,
    Content,
    Figure,
    Row,
    Section,
    Table,
    cell,
    paragraph,
)
from kvlab.report.figures.plot import Axis, Plot, Point, Points
from kvlab.report.formatting import PLUS_MINUS, display_unit, format_exact_bytes, format_metric
from kvlab.report.table_columns import mean_cell, mean_column

_TITLES = {
    "ttft_ms": "first token (ms)",
    "tpot_ms_p50": "per token p50 (ms)",
    "tpot_ms_p95": "per token p95 (ms)",
    "tpot_ms_p99": "per token p99 (ms)",
    "tpot_ms_uncached_p50": "per token, no cache (ms)",
    "tokens_per_second": "tokens/s, largest batch",
}


def report_speed(study: Study) -> Section | None:
    """List every cell's times and plot the time per token against the bytes read."""
    metrics = [metric for metric in _TITLES if metric in study.measured_metrics]
    if not metrics:
        return None
    devices = sorted({str(row.record["provenance"].get("device")) for row in study.done_rows})
    device_note = (
        " They differ, so times of different cells do not compare." if len(devices) > 1 else ""
    )
    note = paragraph(
        f"Measured on {'; '.join(devices)}.{device_note}{_describe_timings(study)}"
        " On a small model the work beside attention dominates, so saved K/V reads need not show in"
        " the time per token.",
    )
    columns = (Column("cell"), *(mean_column(_TITLES[metric]) for metric in metrics))
    rows = []
    for levels in study.cells:
        entries = [mean_cell(study, levels, metric) for metric in metrics]
        if any(entry is not EMPTY_CELL for entry in entries):
            rows.append(Row((cell(study.label(levels)), *entries), study.cell_key(levels)))
    caption = f"Mean {PLUS_MINUS} standard deviation over seeds; batch 1 unless said."
    contents: list[Content] = [note, Table("speed", caption, columns, tuple(rows))]
    if "tpot_ms_p50" in metrics and "kv_bytes_read" in study.measured_metrics:
        contents.append(_figure(study))
    return Section("Speed", tuple(contents), not study.is_untrained)


def _describe_timings(study: Study) -> str:
    """Describe how many trials were timed while something else ran, if the results record it."""
    timings = [row.record["provenance"].get("timings") for row in study.done_rows]
    shared = describe_shared_timings(study)
    if shared:
        return f" {shared}: compare their times with care."
    if None in timings:
        return " Trials that ran side by side on one machine disturb each other's times."
    return " Nothing else used a device while it was timed."


def _figure(study: Study) -> Figure:
    metric = "tpot_ms_p50"
    read, times = study.means("kv_bytes_read"), study.means(metric)
    points: list[Point] = []
    baseline_points: list[Point] = []
    for levels, count in read.items():
        if levels not in times or count <= 0:
            continue
        tip = (
            study.label(levels),
            f"reads {format_exact_bytes(round(count))} per token",
            f"{format_metric(metric, times[levels])} {display_unit(metric)} per token",
        )
        label = study.label(levels) if levels == study.baseline else ""
        seed_times = study.values(levels, metric).values()
        ends = (min(seed_times), max(seed_times))
        point = Point(count, times[levels], tip, study.cell_key(levels), label, y_range=ends)
        (baseline_points if label else points).append(point)
    plot = Plot(
        Axis("K/V bytes read per token at block size", "bytes"),
        Axis("time per output token, p50 (ms)"),
        (
            Points("cells", tuple(points), "c0"),
            Points("baseline", tuple(baseline_points), "c1", "diamond"),
        ),
    )
    lows = f"from {format_metric(metric, min(times.values()))}" if times else ""
    highs = f"to {format_metric(metric, max(times.values()))} ms" if times else ""
    caption = (
        "Time per token against the K/V bytes that it reads: mean, smallest and largest over"
        " seeds. The vertical axis does not start at zero."
    )
    return Figure("speed", caption, f"{caption} Times range {lows} {highs}.", plot)


def report_benchmark_curves(study: Study) -> Section | None:
    """Plot latency and throughput of trials that measured several contexts or batch sizes."""
    lines, keys = benchmark_lines(study, MAX_VARIANTS)
    figures = list(benchmark_figures(lines, keys))
    if not figures:
        return None
    n_noisy = len({line["variant"] for line in lines if line["noisy"]})
    text = "The baseline and the cells that differ from it in one factor; means over seeds."
    if n_noisy:
        text += (
            f" In {format_count(n_noisy, 'cell')} of {len(keys)} something else used the"
            " machine, or the times did not settle: see the lines of the trials' results."
        )
    contents = (paragraph(text), *figures)
    return Section("Latency and throughput curves", contents, not study.is_untrained)
