"""What a sweep's own run says: numbers of the whole sweep, and the answer as its description."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.store.metrics import METRICS

MAX_NOTE_LENGTH = 4500
"""Characters of a description; MLflow takes 5,000 of an experiment's."""

_LOCAL_LINK = re.compile(r"\]\((?!https?://)[^)]*\)")


def measure_sweep(study: Study) -> dict[str, float]:
    """Return the metrics of a sweep's own run.

    Returns:
        Trials by status. ``sweep/best_<metric>``: the best cell's mean over seeds, of cells none
        of whose trials diverged. ``sweep/kv_bytes_within_noise``: the smallest cache of a cell
        that is not told apart from the baseline, or is better. ``sweep/kv_bytes_baseline``. What
        has no value yet is left out.
    """
    counts = study.status_counts
    metrics: dict[str, float | None] = {
        f"sweep/trials_{status}": float(counts[status]) for status in ("done", "failed", "diverged")
    }
    metrics["sweep/trials_missing"] = float(counts["missing"] + counts["damaged"])
    if counts["pruned"]:
        metrics["sweep/trials_pruned"] = float(counts["pruned"])
    metric = study.primary_metric
    if (best := find_best_cell(study)) is not None:
        metrics[f"sweep/best_{metric}"] = study.ranked_means(metric)[best]
    sizes = [study.kv_bytes(levels) for levels in _cells_within_noise(study)]
    metrics["sweep/kv_bytes_within_noise"] = min((size for size in sizes if size), default=None)
    metrics["sweep/kv_bytes_baseline"] = study.kv_bytes(study.baseline)
    return {
        name: float(value)
        for name, value in metrics.items()
        if value is not None and math.isfinite(value)
    }


def find_best_cell(study: Study) -> Levels | None:
    """Return the cell with the best mean of the metric that the sweep decides by.

    Of a search it is the best trial within the limits, by the first objective that is measured.
    """
    metric = study.primary_metric
    if study.search is not None:
        leader = study.search.find_leader(metric)
        return None if leader is None else (leader.level,)
    means = study.ranked_means(metric)
    sign = -1.0 if METRICS[metric].better == "higher" else 1.0
    return min(means, key=lambda levels: sign * means[levels], default=None)


def _cells_within_noise(study: Study) -> Iterator[Levels]:
    """Iterate over the cells that no interval shows to be worse than the baseline.

    The baseline is one of them. With one seed nothing has an interval, so there is no other. A
    search has no such cells: its trials are suggestions.
    """
    if study.search is not None:
        return
    if study.is_untrained or not study.values(study.baseline, study.primary_metric):
        return
    yield study.baseline
    is_higher_better = METRICS[study.primary_metric].better == "higher"
    for levels, found in study.cell_differences.items():
        is_worse = found.high < 0 if is_higher_better else found.low > 0
        if found.kind == "tested" and not is_worse and levels not in study.diverged_cells:
            yield levels


def summarize_states(states: Mapping[str, int]) -> str:
    """Return how many trials ended how, in words."""
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def describe_sweep(sweep: Mapping[str, Any], states: Mapping[str, int], report: Path | None) -> str:
    """Return a sweep's description in Markdown: the report's answer, else the question.

    Args:
        states: number of trials by status.
        report: folder of the sweep's report; None if it was not made.
    """
    answer = _read_answer(report) if report is not None else ""
    return f"{answer or sweep['question']}\n\n{summarize_states(states)}"


def _read_answer(report: Path) -> str:
    """Return the paragraphs of a report's answer that fit, without pictures and local links."""
    path = report / "report.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    title, _, section = text.partition("\n## ")[2].partition("\n")
    if "answer" not in title.lower():
        return ""
    kept: list[str] = []
    for paragraph in section.partition("\n## ")[0].strip().split("\n\n"):
        if _LOCAL_LINK.search(paragraph):
            continue
        if sum(map(len, kept)) + len(paragraph) > MAX_NOTE_LENGTH:
            kept.append("More is in the report, among this run's artifacts.")
            break
        kept.append(paragraph)
    return "\n\n".join(kept)
