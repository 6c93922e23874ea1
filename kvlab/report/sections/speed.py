"""Memory and speed of serving: bytes, times, their curves, and the roofline."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.analysis import trial_rows
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.layout.roofline_model import MAX_BREAK_EVEN, DevicePeaks, find_break_even
from kvlab.report import benchmark_plots as bench
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.pareto_front import COSTS
from kvlab.store.provenance import describe_device

_TITLES = {
    "ttft_ms": "first token (ms)",
    "tpot_ms_p50": "per token p50 (ms)",
    "tpot_ms_p95": "per token p95 (ms)",
    "tpot_ms_p99": "per token p99 (ms)",
    "tpot_ms_uncached_p50": "per token, no cache (ms)",
    "tokens_per_second": "tokens/s, largest batch",
}


def report_memory(study: Study) -> doc.Section | None:
    """Compare the formula with the cache's storages, and list peaks."""
    measured = [row for row in study.done_rows if "kv_bytes_storage" in row.measurements]
    if not measured:
        return None
    n_wrong = sum(not _agrees(row) for row in measured)
    note = texts.write("memory", n_wrong=n_wrong, n=len(measured))

    def entries(levels: Levels) -> doc.Entries:
        rows = [row for row in study.cells[levels].values() if row in measured]
        if not rows:
            return
        formula = int(rows[0].record["kv"]["bytes_at_block_size"])
        stored = sorted({int(row.measurements["kv_bytes_storage"]) for row in rows})
        agree = all(map(_agrees, rows))
        yield cols.size_column("K/V cache", "by the formula"), cols.size_cell(formula)
        text = ", ".join(f"{count:,}" for count in stored)
        sizes = doc.Cell(text, stored[0], csv=(stored[0], stored[-1]))
        column = cols.range_column("storages (bytes)", ends=("least", "most"))
        yield column if n_wrong else cols.csv_only(column), sizes
        is_equal = doc.cell("yes" if agree else "no", tone="" if agree else "bad")
        yield "agree" if n_wrong else cols.csv_only("agree"), is_equal
        for metric, title, hint in (
            ("kv_bytes_read", "read per token", ""),
            ("peak_bytes_cached", "peak with cache", "largest over seeds"),
            ("peak_bytes_uncached", "peak without", "largest over seeds"),
            ("peak_bytes_activations", "activations", "of the peak with cache"),
        ):
            found = [row.measurements[metric] for row in rows if metric in row.measurements]
            largest = cols.size_cell(round(max(found)) if found else None)
            yield cols.size_column(title, hint), largest

    table = cols.cells_table(study, "memory", "Memory of every cell.", entries)
    is_appendix = not study.is_untrained and not n_wrong
    return doc.Section("Memory", (note, table), is_appendix)


def _agrees(row: TrialRow) -> bool:
    stored = row.measurements["kv_bytes_storage"]
    formula = row.measurements.get("kv_bytes_formula", stored)
    return bool(stored == formula == row.record["kv"]["bytes_at_block_size"])


# Speed


def report_speed(study: Study) -> doc.Section | None:
    """List every cell's times and plot the time per token against the bytes read."""
    metrics = [metric for metric in _TITLES if metric in study.measured_metrics]
    if not metrics:
        return None
    is_disturbed = any(map(trial_rows.is_shared, study.done_rows))

    def entries(levels: Levels) -> doc.Entries:
        for metric in metrics:
            yield cols.mean_column(_TITLES[metric]), cols.mean_cell(study, levels, metric)
        if is_disturbed:
            rows = [row for row in study.cells[levels].values() if row.is_done]
            count = sum(map(trial_rows.is_shared, rows))
            hint = "trials timed while something else ran, of all"
            column = doc.Column("disturbed", True, hint, ("disturbed", "n"))
            tone: doc.Tone = "bad" if count else ""
            yield column, doc.Cell(f"{count} of {len(rows)}", count, tone, csv=(count, len(rows)))

    timed = [c for c in study.cells if any(study.values(c, metric) for metric in metrics)]
    caption = f"Mean {fmt.PLUS_MINUS} standard deviation over seeds; batch 1 unless said."
    table = cols.cells_table(study, "speed", caption, entries, timed)
    contents: list[doc.Content] = [_describe_timings(study), table]
    if "tpot_ms_p50" in metrics and "kv_bytes_read" in study.measured_metrics:
        contents.extend(_speed_figure(study))
    return doc.Section("Speed", tuple(contents), not study.is_untrained)


def _describe_timings(study: Study) -> doc.Paragraph:
    """Say on what and by which kernels times were taken, and what else ran meanwhile."""
    rows = study.done_rows
    notes = {line.get("attention") for row in rows for line in row.record.get("benchmark", [])}
    kernels = sorted({name for note in notes if note for name in note.split("; ")})
    fields = {
        "devices": sorted({describe_device(row.record["provenance"]) for row in rows}),
        "kernels": cols.join_names(kernels),
        "n": len(rows),
        "n_again": sum(map(trial_rows.is_timed_again, rows)),
        "shared": trial_rows.describe_shared_timings(rows),
        "is_unknown": any(row.record["provenance"].get("timings") is None for row in rows),
    }
    return texts.write("timings", **fields)


def _speed_figure(study: Study) -> Iterator[doc.Figure]:
    metric = "tpot_ms_p50"
    read, times = study.means("kv_bytes_read"), study.means(metric)
    points: dict[bool, list[doc.Point]] = {False: [], True: []}
    for levels, count in read.items():
        if levels not in times or count <= 0:
            continue
        label, is_base = study.label(levels), levels == study.baseline
        tip = (label, COSTS["read"].format(count), COSTS["time"].format(times[levels]))
        seed_times = study.values(levels, metric).values()
        ends, name = (min(seed_times), max(seed_times)), label if is_base else ""
        point = doc.Point(count, times[levels], tip, study.cell_key(levels), name, y_range=ends)
        points[is_base].append(point)
    if not any(points.values()):
        return
    plot = doc.Plot(
        doc.Axis("K/V bytes read per token at block size", "bytes"),
        doc.Axis("time per output token, p50 (ms)"),
        (
            doc.Points("cells", tuple(points[False]), "c0"),
            doc.Points("baseline", tuple(points[True]), "c1", "diamond"),
        ),
    )
    caption = texts.fill("caption of speed")
    ends = (min(times.values()), max(times.values()))
    low, high = (fmt.format_metric(metric, time) for time in ends)
    yield doc.Figure("speed", caption, f"{caption} Times range from {low} to {high} ms.", plot)


def report_benchmark_curves(study: Study) -> doc.Section | None:
    """Plot latency and throughput of trials that measured several contexts or batch sizes."""
    lines, keys = bench.benchmark_lines(study, bench.MAX_VARIANTS)
    figures = list(bench.benchmark_figures(lines, keys))
    if not figures:
        return None
    n_noisy = len({line["variant"] for line in lines if line["noisy"]})
    note = texts.write("curves", n_noisy=n_noisy, n=len(keys))
    title, is_appendix = "Latency and throughput curves", not study.is_untrained
    return doc.Section(title, (note, *figures), is_appendix)


# Roofline


def report_roofline(study: Study) -> doc.Section | None:
    """Report decode steps of trials that measured the roofline (``benchmark.roofline: true``)."""
    lines, keys = bench.benchmark_lines(study, bench.MAX_VARIANTS)
    figure = bench.roofline_figure(lines, keys)
    if figure is None:
        return None
    steps = bench.group_steps(lines).items()
    rows = ((_step_entries(*step, found), keys.get(step[0], "")) for step, found in steps)
    names = ("bandwidth", "product_bandwidth", "matrix_rate")
    peaks = {line["metric"]: line for line in reversed(lines) if line["metric"] in names}
    rates = {metric: fmt.format_significant(line["value"] / 1e9) for metric, line in peaks.items()}
    notes = {metric: str(line.get("note", "")) for metric, line in peaks.items()}
    contents: list[doc.Content] = [
        texts.write("roofline", rates=rates, notes=notes),
        doc.make_table("roofline", "One decode step of the whole batch.", rows),
        *_tabulate_break_even(study, lines, keys),
        figure,
    ]
    return doc.Section("Roofline", tuple(contents), not study.is_untrained)


def _step_entries(
    variant: str, batch: int, context: int, lines: Mapping[str, Mapping[str, Any]]
) -> doc.Entries:
    values = {metric: line["value"] for metric, line in lines.items()}

    def number(metric: str, unit: float) -> doc.Cell:
        value = values[metric] / unit if metric in values else None
        return cols.number_cell(value, fmt.format_significant)

    yield "cell", variant
    yield "batch", batch
    yield "context", context
    yield "GFLOPs", number("step_flops", 1e9), "10^9 floating-point operations"
    for title, metric in (("weights", "step_weight_bytes"), ("K/V read", "step_kv_read_bytes")):
        size = round(values[metric]) if metric in values else None
        yield cols.size_column(title), cols.size_cell(size)
    yield "predicted (ms)", number("step_predicted", 1e-3)
    yield "measured (ms)", number("step_measured", 1e-3)
    for title, hint in (
        ("MBU", "weights and K/V read each second, of the bandwidth"),
        ("MFU", "FLOPs each second, of the matrix rate"),
    ):
        share = values[title.lower()]
        column = doc.Column(title, True, hint, (f"{title} (%)",))
        yield column, doc.cell(fmt.format_percent(share), 100 * share)
    yield "bound by", str(lines["step_predicted"].get("verdict"))


def _tabulate_break_even(
    study: Study, lines: list[dict[str, Any]], keys: Mapping[str, str]
) -> list[doc.Table]:
    """Tabulate the context and the batch from which each layout is faster than the baseline's."""
    firsts = {line["metric"]: line for line in reversed(lines)}
    base = bench.cell_experiment(study, study.baseline)
    if base is None or not {"bandwidth", "matrix_rate"} <= firsts.keys():
        return []
    of_memory = firsts["bandwidth"]
    of_products = firsts.get("product_bandwidth", of_memory)
    rates = (one["value"] for one in (of_memory, firsts["matrix_rate"], of_products))
    peaks = DevicePeaks(of_memory["device"], of_memory["dtype"], 0, *rates)

    def entries(levels: Levels) -> doc.Entries:
        own = bench.cell_experiment(study, levels)
        if levels == study.baseline or study.cell_key(levels) not in keys.values() or own is None:
            return
        pair = (own.model, own.serving), (base.model, base.serving)
        context = find_break_even(*pair, peaks, batch_size=1)
        batch = find_break_even(*pair, peaks, context_length=own.model.block_size)
        heads = ("context at batch 1 (tokens)", "batch at the block size (sequences)")
        for head, found in zip(heads, (context, batch), strict=True):
            if found is None:
                shown = doc.cell("never", MAX_BREAK_EVEN + 1, csv=(None, None))  # sorts last
            else:
                end = found[-1] if found[-1] < MAX_BREAK_EVEN else None
                text = f"{found[0]:,}" + (f" to {end:,}" if end else "")
                shown = doc.cell(text, found[0], csv=(found[0], end))
            yield doc.Column(head, True, csv=(head, f"{head}, up to")), shown

    table = cols.cells_table(study, "break-even", texts.fill("caption of break-even"), entries)
    return [table] if table.rows else []
