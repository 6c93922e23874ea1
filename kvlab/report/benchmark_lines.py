"""Benchmark measurements of a study's trials: one line per cell, the mean over its seeds."""

import math
from collections.abc import Mapping
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.layout.roofline_model import DevicePeaks
from kvlab.spec.experiment import Experiment

_LINE_KEY = (
    "metric", "batch_size", "prompt_tokens", "context_length", "cached", "turn", "budget_bytes",
)  # fmt: skip


def benchmark_lines(study: Study, max_cells: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the lines of the baseline and of the cells that differ from it in one factor.

    A line is a `kvlab.benchmark.measurement.Measurement` as plain data. Its ``variant`` is the
    cell's label, its value the mean over seeds, ``low`` and ``high`` are the smallest and largest
    value (with one seed, the measurement's own interval).

    Args:
        study: The study.
        max_cells: Number of cells after which further cells are left out.

    Returns:
        The lines, and the cells' keys by label.
    """
    lines: list[dict[str, Any]] = []
    keys: dict[str, str] = {}
    for levels in study.cells:
        if study.n_changed_factors(levels) <= 1 and len(keys) < max_cells:
            found = cell_lines(study, levels)
            keys |= {study.label(levels): study.cell_key(levels)} if found else {}
            lines += found
    return lines, keys


def cell_lines(study: Study, levels: Levels) -> list[dict[str, Any]]:
    """Return the lines of one cell; see `benchmark_lines`."""
    by_key: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in study.cells[levels].values():
        for line in row.record.get("benchmark", []) if row.is_done else []:
            if line.get("value") is not None:
                key = tuple(line.get(name) for name in _LINE_KEY)
                by_key.setdefault(key, []).append(line)
    means = []
    for lines in by_key.values():
        values = [line["value"] for line in lines]
        mean: dict[str, Any] = {**lines[0], "variant": study.label(levels)}
        mean |= {"value": math.fsum(values) / len(values)}
        if len(lines) > 1:
            mean |= {"low": min(values), "high": max(values), "quantiles": []}
        means.append(mean | {"noisy": any(line.get("noisy") for line in lines)})
    return means


def measured_peaks(lines: list[dict[str, Any]]) -> DevicePeaks | None:
    """Return the device's measured peak rates, from the first lines that have them."""
    first_lines: dict[str, dict[str, Any]] = {}
    for line in lines:
        first_lines.setdefault(line["metric"], line)
    if not {"bandwidth", "matrix_rate"} <= first_lines.keys():
        return None
    bandwidth, matrix_rate = first_lines["bandwidth"], first_lines["matrix_rate"]
    products = first_lines.get("product_bandwidth", bandwidth)["value"]
    rates = bandwidth["value"], matrix_rate["value"], products
    return DevicePeaks(bandwidth["device"], bandwidth["dtype"], 0, *rates)


def cell_experiment(study: Study, levels: Levels) -> Experiment | None:
    """Return a cell's recorded experiment; None if no trial of it has ended."""
    for row in study.cells.get(levels, {}).values():
        if "experiment" in row.record:
            # a record may have settings of an earlier version, at what was their default
            return Experiment.model_validate(row.record["experiment"], extra="ignore")
    return None
