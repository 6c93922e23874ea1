"""What MLflow shows of a sweep: numbers and answer of its own run, and the views of its page.

A view is a tag of the experiment with the state of the page, as the page itself stores a view that
a user saves. The page lists views by name, and opens the one that the address names.
"""

import base64
import json
import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import WORSE
from kvlab.spec.sweep import SEARCH_FACTOR
from kvlab.store.metrics import METRICS
from kvlab.track.run_description import factor_param, tracked_name

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
    statuses = ("done", "failed", "diverged", *(["pruned"] if counts["pruned"] else []))
    metrics: dict[str, float | None] = {f"sweep/trials_{one}": counts[one] for one in statuses}
    metrics["sweep/trials_missing"] = counts["missing"] + counts["damaged"]
    metric = study.primary_metric
    if (best := find_best_cell(study)) is not None:
        metrics[f"sweep/best_{metric}"] = study.ranked_means(metric)[best]
    within_noise: list[Levels] = []  # none of a search, whose trials are suggestions
    is_compared = study.search is None and not study.is_untrained
    if is_compared and study.values(study.baseline, metric):
        within_noise += study.estimand.references
        for levels, found in study.comparisons.items():
            if found.has_interval and found.verdict_name not in WORSE:
                within_noise.append(levels)
    sizes = filter(None, map(study.kv_bytes, within_noise))
    metrics["sweep/kv_bytes_within_noise"] = min(sizes, default=None)
    metrics["sweep/kv_bytes_baseline"] = study.kv_bytes(study.baseline)
    return {name: float(v) for name, v in metrics.items() if v is not None and math.isfinite(v)}


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


def describe_sweep(sweep: Mapping[str, Any], states: str, report: Path | None) -> str:
    """Return a sweep's description in Markdown: the report's answer, else the question.

    Pictures, local links and what does not fit are left out.

    Args:
        states: number of trials by status, in words.
        report: folder of the sweep's report; None if it was not made.
    """
    path = report / "report.md" if report is not None else None
    text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
    title, _, section = text.partition("\n## ")[2].partition("\n")
    paragraphs = section.partition("\n## ")[0].strip().split("\n\n")
    is_answer = "answer" in title.lower()
    answer = "\n\n".join(p for p in paragraphs if is_answer and not _LOCAL_LINK.search(p))
    if len(answer) > MAX_NOTE_LENGTH:
        whole = answer[:MAX_NOTE_LENGTH].rpartition("\n\n")[0]
        answer = f"{whole}\n\nMore is in the report, among this run's artifacts."
    return f"{answer or sweep['question']}\n\n{states}"


# Saved views


VIEW_TAG = "mlflow.sharedViewState."
TRIALS_VIEW = "kvlab-trials"
CELLS_VIEW = "kvlab-cells"

MAX_FACTOR_COLUMNS = 8

_CHARTS = Path(__file__).with_name("charts.json")
"""The charts that the page's tab of charts begins with: the front, the quality of every run and its
curve. Without them the tab begins with a chart of a single point for each size of the cache. The
page adds charts of all other metrics, in sections by group. It would sort the sections by name if
they did not say that they are ordered."""

_COLUMNS = ("kv/bytes", "speed/tpot_ms_p50")
"""Metrics beside the quality that the sweep decides by."""


def experiment_tags(sweep: Mapping[str, Any], metric: str) -> dict[str, str]:
    """Return the tags that make MLflow's page open on a sweep's runs.

    Args:
        sweep: contents of `sweep.json`.
        metric: of the record, that the sweep decides by.
    """
    settings = [factor_param(factor) for factor in sweep["factors"]]
    if settings == [SEARCH_FACTOR]:  # what the points of the search set
        patches = (sweep.get("patches") or {}).get(SEARCH_FACTOR, {}).values()
        settings = list(dict.fromkeys(name for patch in patches for name in patch)) or settings
    quality = tracked_name(metric)[0]
    is_higher_better = METRICS[metric].better == "higher"
    metrics = [f"metrics.`{name}`" for name in (quality, *_COLUMNS)]
    params = [f"params.`{name}`" for name in (*settings[:MAX_FACTOR_COLUMNS], "seed")]
    columns = [*params, *metrics]
    trials: dict[str, Any] = {
        "orderByKey": metrics[0],
        "orderByAsc": not is_higher_better,
        "selectedColumns": columns,
        "columnOrder": columns,
        # in pixels, so that each shows its name and a number
        "columnWidths": {c: max(90, 9 * len(c.partition("`")[2]) + 20) for c in columns},
        "runsHiddenMode": "SHOWALL",
        **json.loads(_CHARTS.read_text(encoding="utf-8").replace("QUALITY", quality)),
    }
    keys = [{"mode": "tag", "groupByData": "kvlab.cell"}]
    cells = {
        **trials,
        "selectedColumns": metrics,
        "columnOrder": metrics,
        "groupBy": {"aggregateFunction": "average", "groupByKeys": keys},
    }
    return {
        "kvlab.sweep": sweep["name"],
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.experiment.primaryMetric.name": quality,
        "mlflow.experiment.primaryMetric.greaterIsBetter": json.dumps(is_higher_better),
        f"{VIEW_TAG}{TRIALS_VIEW}": _view("Trials", trials),
        f"{VIEW_TAG}{CELLS_VIEW}": _view("Cells, mean over seeds", cells),
    }


def view_address(server: str, experiment: str, view: str = TRIALS_VIEW) -> str:
    """Return the address of a view; it selects model training, as the page starts with GenAI."""
    query = urlencode({"viewStateShareKey": view, "workflowType": "machine_learning"})
    return f"{server.rstrip('/')}/#/experiments/{experiment}/runs?{query}"


def _view(name: str, state: Mapping[str, Any]) -> str:
    """Return a saved view as the page stores it: name, time and compressed state."""
    text = json.dumps(state, separators=(",", ":")).encode()
    compressed = "deflate;" + base64.b64encode(zlib.compress(text, 9)).decode()
    return json.dumps({"name": name, "createdAt": 0, "state": compressed}, separators=(",", ":"))
