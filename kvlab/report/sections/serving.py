"""What serving changes: losses, predictions and caches."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from kvlab.analysis.statistics import CONFIDENCE, sum_squares, t_quantile
from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.analysis.trial_rows import Levels
from kvlab.own_extensions import find_members
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.store.metrics import METRICS

_EXACT = "exact K and V"
_KL, _TOP_CHANGED = "serving_kl", "serving_top_changed"

Interval = tuple[float, float | None, float | None]
"""A cell's mean, and the ends of its simultaneous interval if it has one."""


def report_serving_gap(study: Study) -> doc.Section | None:
    """List the cells whose served loss differs from their one-shot loss."""
    gaps = study.means("serving_gap")
    if not gaps:
        return None
    with_gap = [levels for levels in gaps if abs(gaps[levels]) >= GAP_ROUNDING]
    largest = max(gaps, key=lambda levels: abs(study.serving_gaps[levels].value))
    fields = {
        "n": len(gaps),
        "n_beyond": len(with_gap),
        "rounding": GAP_ROUNDING,
        "largest": study.label(largest),
        "gap": study.serving_gaps[largest].value,
        "is_aware": any(_trained_formats(study, levels) != {_EXACT} for levels in gaps),
    }
    contents: list[doc.Content] = [texts.write("serving gap", **fields)]
    if with_gap:
        caption = "Cells whose serving cache changes the loss beyond rounding."
        entries = partial(_gap_entries, study)
        contents.append(cols.cells_table(study, "serving-gap", caption, entries, with_gap))
    caches = (_report_cache_dtype, *find_members("cache_reports").values())
    contents += _report_divergence(study)
    return doc.Section("Serving gap", (*contents, *(c for one in caches for c in one(study))))


def _gap_entries(study: Study, levels: Levels) -> doc.Entries:
    metric = "serving_gap"
    gaps, test = list(study.values(levels, metric).values()), study.serving_gaps[levels]
    yield "n", len(gaps)
    for title, name in (("one-shot loss", "loss_paired"), ("served loss", "loss_served")):
        yield cols.mean_column(title, "nats/token"), cols.mean_cell(study, levels, name)
    yield (
        cols.mean_column("gap (nats/token)"),
        cols.spread_cell(metric, gaps, fmt.format_difference),
    )
    heads = ("smallest gap (nats/token)", "largest gap (nats/token)")
    ends = cols.range_cell(metric, min(gaps), max(gaps)) if len(gaps) > 1 else doc.EMPTY_CELL
    yield doc.Column("smallest and largest", True, "gap over seeds", heads), ends
    column = cols.simultaneous_column(metric, study.decide.alpha, "over trainings, for all cells")
    is_tested = test.kind == "tested"
    yield column, cols.range_cell(metric, test.low, test.high) if is_tested else doc.EMPTY_CELL
    p = cols.number_cell(test.p if is_tested else None, fmt.format_p_value)
    yield "p", p, "corrected for all cells"
    verdict = doc.cell("within noise" if is_tested else "not tested", tone="muted")
    if test.is_found:
        is_worse = test.value > 0
        verdict = doc.cell("worse" if is_worse else "better", tone="bad" if is_worse else "good")
    yield "verdict", verdict, "of the gap"


# Predictions


def _report_divergence(study: Study) -> list[doc.Content]:
    """Report KL divergence and changed top tokens of every cell, with intervals."""
    means = study.means(_KL)
    beyond = [levels for levels, mean in means.items() if mean]
    if not beyond:
        return []
    found = {levels: _kl_interval(study, levels, len(beyond)) for levels in beyond}
    found = dict(sorted(found.items(), key=lambda item: item[1][0]))
    limit = fmt.format_spread(METRICS["serving_kl"].rounding, 1)
    fields = {"n": len(means) - len(beyond), "limit": limit}
    caption = "What serving changes in the distribution of the next token, the least first."

    def entries(levels: Levels) -> doc.Entries:
        hint = "simultaneous over the cells of the table"
        share = _share_interval(study, levels, len(found))
        yield "n", len(study.values(levels, _KL))
        for metric, title, unit, about, (value, *ends) in (
            (_KL, "KL", "nats/token", "KL(one-shot || served)", found[levels]),
            (_TOP_CHANGED, "top changed", "%", "positions whose likeliest token differs", share),
        ):
            yield doc.Column(f"{title} ({unit})", True, about), cols.value_cell(metric, value)
            known = [end for end in ends if end is not None]
            text = " to ".join(fmt.format_metric(metric, end) for end in known)
            csv = tuple(fmt.in_display_unit(metric, end) for end in known)
            interval = doc.Cell(text, csv[0], csv=csv) if known else doc.EMPTY_CELL
            yield cols.range_column(f"{title} 95% CI", unit, hint), interval

    folded: tuple[doc.Content, ...] = (
        texts.write("divergence of predictions", study=study, **fields),
        _draw_divergence(study, found),
        cols.cells_table(study, "serving-divergence", caption, entries, found),
    )
    worst = list(found)[-1]
    share = study.mean(worst, _TOP_CHANGED)
    n_seeds = len(study.values(worst, _KL))
    fields = {"name": study.label(worst), "kl": found[worst][0], "share": share, "n_seeds": n_seeds}
    summary = texts.write("largest divergence", **fields)
    return [summary, doc.Fold("Divergence from one-shot predictions", folded)]


def _kl_interval(study: Study, levels: Levels, n_cells: int) -> Interval:
    """Return the geometric mean over seeds; at one seed the mean, with the error over windows."""
    values = list(study.values(levels, _KL).values())
    if min(values) <= 0:
        return math.fsum(values) / len(values), None, None
    logs = [math.log(value) for value in values]
    center, reach = _mean_and_reach(study, levels, logs, _KL, n_cells)
    if len(values) == 1:  # the error is that of the divergence itself
        reach /= values[0]
    ends = (math.exp(center - reach), math.exp(center + reach)) if reach else (None, None)
    return math.exp(center), *ends


def _share_interval(study: Study, levels: Levels, n_cells: int) -> Interval:
    values = list(study.values(levels, _TOP_CHANGED).values())
    center, reach = _mean_and_reach(study, levels, values, _TOP_CHANGED, n_cells)
    ends = (max(0.0, center - reach), min(1.0, center + reach)) if reach else (None, None)
    return center, *ends


def _mean_and_reach(
    study: Study, levels: Levels, values: list[float], metric: str, n_cells: int
) -> tuple[float, float]:
    """Return the mean and the half width of its interval: over windows of text at one seed."""
    count, center = len(values), math.fsum(values) / len(values)
    if count > 1:
        error, df = math.sqrt(sum_squares(values, center) / (count - 1) / count), count - 1
    else:
        error = study.mean(levels, f"{metric}_stderr") or 0.0
        windows = (study.mean(levels, "served_tokens") or 0) // (study.block_size(levels) or 1)
        df = max(1, int(windows) - 1)
    tail = (1 - CONFIDENCE) / 2 / n_cells
    return center, error * t_quantile(1 - tail, df) if error else 0.0


def _draw_divergence(study: Study, found: Mapping[Levels, Interval]) -> doc.Figure:
    points = []
    for index, (levels, (value, low, high)) in enumerate(found.items()):
        ends = (low, high) if low is not None and high is not None else None
        tip = (study.label(levels), f"KL {fmt.format_metric(_KL, value)} nats/token")
        points.append(doc.Point(value, index, tip, study.cell_key(levels), x_range=ends))
    plot = doc.Plot(
        doc.Axis("KL(one-shot || served), nats/token", "log"),
        doc.Axis("", "names", tuple(map(study.label, found))),
        (doc.Points("", tuple(points), "c0", "diamond"),),
    )
    bars = ", with simultaneous 95% intervals" if any(p.x_range for p in points) else ""
    caption = f"Divergence of the served predictions from the one-shot ones{bars}."
    alt = f"{caption} {doc.describe_points(plot)}"
    return doc.Figure("serving-divergence", caption, alt, plot)


# Caches


def list_sections(study: Study, levels: Levels, name: str) -> list[Mapping[str, Any]]:
    """Return a section of the experiments of a cell's finished trials."""
    rows = (row for row in study.cells[levels].values() if row.is_done)
    return [row.record["experiment"].get(name, {}) for row in rows]


def _trained_formats(study: Study, levels: Levels) -> set[str]:
    """Return how the forward passes of a cell's trainings read K and V, in words."""
    return {
        _EXACT if recipe.get("kv_dtype", "model") == "model" else _describe_format(recipe)
        for recipe in list_sections(study, levels, "training")
    }


def _describe_format(section: Mapping[str, Any]) -> str:
    """Return the storage that ``training`` or ``serving`` of an experiment names, in words."""
    group, residual = section.get("kv_group"), section.get("kv_residual")
    groups = f", groups of {group}" if group else ""
    newest = (
        "" if residual is None else f", newest {residual} or more in full"
    )  # up to a block more
    rotated = ", rotated" if section.get("kv_rotate", "none") != "none" else ""
    stored = section["kv_dtype"]
    if isinstance(stored, Mapping) and stored.keys() == {"k", "v"}:
        k, v = map(fmt.describe_member, (stored["k"], stored["v"]))
        return f"K {k}, V {v}{groups}{newest}{rotated}"
    return f"{fmt.describe_member(stored)}{groups}{newest}{rotated}"


def _report_cache_dtype(study: Study) -> list[doc.Content]:
    """Report what storing K and V in another dtype costs, if cells do."""
    quantized = list(study.means("kv_dtype_loss_change"))
    if not quantized:
        return []
    is_aware = any(_trained_formats(study, levels) != {_EXACT} for levels in quantized)

    def show(_: str, change: float) -> str:  # four decimals show too little
        return fmt.format_significant(change, 2)

    def show_change(_: str, change: float) -> str:
        return f"{'+' if change > 0 else ''}{show(_, change)}"

    def entries(levels: Levels) -> doc.Entries:
        kept = {_describe_format(one) for one in list_sections(study, levels, "serving")}
        yield "kept as", ", ".join(sorted(kept))
        if is_aware:
            yield "trained with", ", ".join(sorted(_trained_formats(study, levels)))
        rms, largest = (
            cols.number_cell(study.mean(levels, name), partial(fmt.format_metric, name))
            for name in ("kv_dtype_logit_rms", "kv_dtype_logit_largest")
        )
        yield "logit error, rms (nats)", rms
        heads = ("logit error, largest (nats)",)
        yield doc.Column("largest", True, "logit error", heads), largest
        metric = "kv_dtype_loss_change"
        changes = list(study.values(levels, metric).values())
        change = cols.spread_cell(metric, changes, show_change, show)
        yield cols.mean_column("loss change (nats/token)"), change

    caption = "Cells by the dtype of their cache, against the model's dtype; mean over seeds."
    table = cols.cells_table(study, "kv-dtype", caption, entries, quantized)
    return [
        doc.Heading("The cache's dtype"),
        texts.write("dtype of the cache", is_aware=is_aware),
        table,
    ]
