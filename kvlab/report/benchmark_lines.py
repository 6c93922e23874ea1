"""What the trials' benchmarks measured, a line a cell: the mean over its seeds."""

from collections.abc import Mapping
from typing import Any

from kvlab.layout.roofline_model import DevicePeaks
from kvlab.report.study import Study
from kvlab.report.trial_rows import Levels
from kvlab.spec.experiment import Experiment

_LINE_KEY = ("metric", "batch_size", "prompt_tokens", "context_length", "cached")


def benchmark_lines(study: Study, most: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Lines of the baseline and of the cells that differ from it in one factor.

    ``variant`` is the cell's label. Values are means over seeds; ``low`` and ``high`` the least
    and the most of them, or of one seed its own interval.

    Args:
        most: cells at most; the rest is left out.

    Returns:
        The lines, and label -> the cell's key in the design.
    """
    lines: list[dict[str, Any]] = []
    keys: dict[str, str] = {}
    for levels in study.cells:
        changed = sum(a != b for a, b in zip(levels, study.baseline, strict=True))
        found = _cell_lines(study, levels) if changed <= 1 and len(keys) < most else []
        if found:
            keys[study.label(levels)] = study.key(levels)
            lines += found
    return lines, keys


def _cell_lines(study: Study, levels: Levels) -> list[dict[str, Any]]:
    places: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in study.cells[levels].values():
        for line in row.facts.get("benchmark", []) if row.done else []:
            if line.get("value") is not None:
                place = tuple(line.get(name) for name in _LINE_KEY)
                places.setdefault(place, []).append(line)
    return [_mean_line(study.label(levels), lines) for lines in places.values()]


def _mean_line(label: str, lines: list[Mapping[str, Any]]) -> dict[str, Any]:
    values = [line["value"] for line in lines]
    mean: dict[str, Any] = {**lines[0], "variant": label, "value": sum(values) / len(values)}
    if len(lines) > 1:
        mean |= {"low": min(values), "high": max(values), "quantiles": []}
    mean["noisy"] = any(line.get("noisy") for line in lines)
    return mean


def measured_peaks(lines: list[dict[str, Any]]) -> DevicePeaks | None:
    """The ceilings that the lines name first; None where no trial measured them."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        found.setdefault(line["metric"], line)
    if not {"bandwidth", "matrix_rate"} <= found.keys():
        return None
    moving, computing = found["bandwidth"], found["matrix_rate"]
    products = found.get("product_bandwidth", moving)["value"]
    rates = moving["value"], computing["value"], products
    return DevicePeaks(moving["device"], moving["dtype"], 0, *rates)


def cell_experiment(study: Study, levels: Levels) -> Experiment | None:
    """A cell's configuration as recorded; None where no trial of it has ended."""
    for row in study.cells.get(levels, {}).values():
        if "experiment" in row.facts:
            return Experiment.model_validate(row.facts["experiment"])
    return None


# Whether trials were timed alone: a time taken beside other work says less about its cell.


def describe_shared_timings(study: Study) -> str:
    """How many trials were timed while something else ran, as a clause; empty for none.

    Older results do not say, and count as none.
    """
    said = [row.facts["provenance"].get("timings") for row in study.done]
    count = said.count("shared")
    if not count:
        return ""
    which = "All" if count == len(said) else f"{count} of {len(said)}"
    return (
        f"{which} trials were timed while something else used their device or its machine's cores"
    )
