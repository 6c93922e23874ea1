"""Speed of serving: time to first token, time per output token, throughput, and their curves."""

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, describe_shared_timings, is_shared, is_timed_again
from kvlab.humanize import format_count
from kvlab.report.benchmark_lines import benchmark_lines
from kvlab.report.benchmark_plots import MAX_VARIANTS, benchmark_figures
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
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
from kvlab.report.formatting import PLUS_MINUS, display_unit, format_binary_size, format_metric
from kvlab.report.table_columns import join_names, mean_cell, mean_column
from kvlab.store.provenance import describe_device

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
    devices = sorted({describe_device(row.record["provenance"]) for row in study.done_rows})
    device_note = (
        " They differ, so times of different cells do not compare." if len(devices) > 1 else ""
    )
    note = paragraph(
        f"Measured on {'; '.join(devices)}.{_describe_attention(study)}{device_note}"
        f"{_describe_timings(study)}"
        " On a small model most of the time is spent outside attention, so reading less K/V need"
        " not show in the time per token.",
    )
    is_disturbed = any(map(is_shared, study.done_rows))
    columns = (
        Column("cell"),
        *(mean_column(_TITLES[metric]) for metric in metrics),
        *([_DISTURBED] if is_disturbed else []),
    )
    rows = []
    for levels in study.cells:
        entries = [mean_cell(study, levels, metric) for metric in metrics]
        if any(entry is not EMPTY_CELL for entry in entries):
            entries += [_disturbed_cell(study, levels)] if is_disturbed else []
            rows.append(Row((cell(study.label(levels)), *entries), study.cell_key(levels)))
    caption = f"Mean {PLUS_MINUS} standard deviation over seeds; batch 1 unless said."
    contents: list[Content] = [note, Table("speed", caption, columns, tuple(rows))]
    if "tpot_ms_p50" in metrics and "kv_bytes_read" in study.measured_metrics:
        contents.append(_figure(study))
    return Section("Speed", tuple(contents), not study.is_untrained)


_DISTURBED = Column(
    "disturbed", True, "trials during whose timing something else ran, of all", ("disturbed", "n")
)


def _disturbed_cell(study: Study, levels: Levels) -> Cell:
    """Return how many of a cell's trials were timed while something else ran."""
    rows = [row for row in study.cells[levels].values() if row.is_done]
    count = sum(map(is_shared, rows))
    return Cell(f"{count} of {len(rows)}", count, "bad" if count else "", csv=(count, len(rows)))


def _describe_attention(study: Study) -> str:
    """Name the attention kernels of the times, as far as the results record them."""
    lines = (line for row in study.done_rows for line in row.record.get("benchmark", []))
    notes = {line.get("attention") for line in lines}
    kernels = sorted({name for note in notes if note for name in note.split("; ")})
    return f" Attention kernels: {join_names(kernels)}." if kernels else ""


def _describe_timings(study: Study) -> str:
    """Describe how many trials were timed while something else ran, if the results record it."""
    timings = [row.record["provenance"].get("timings") for row in study.done_rows]
    shared = describe_shared_timings(study.done_rows)
    again = sum(map(is_timed_again, study.done_rows))
    text = ""
    if again:
        which = "All trials" if again == len(timings) else f"{again} of {len(timings)} trials"
        text = (
            f" {which} were timed again at the end of the sweep, with nothing else on the machine,"
            " all cells of a seed in turns. These times replace the first ones, which were taken"
            " as each trial ended."
        )
    if shared:
        return f"{text} {shared}, so differences of times are not judged."
    if again:
        return text
    if None in timings:
        return " The record does not say which trials ran side by side while they were timed."
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
            f"reads {format_binary_size(round(count))} per token",
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
    contents: tuple[Content, ...] = (paragraph(text), *figures)
    return Section("Latency and throughput curves", contents, not study.is_untrained)
