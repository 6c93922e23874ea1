"""The views of a sweep that MLflow's page opens with: which columns, in which order.

A view is a tag of the experiment with the state of the page, as the page itself stores a view that
a user saves. The page lists views by name, and opens the one that the address names.
"""

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from kvlab.spec.sweep import SEARCH_FACTOR
from kvlab.store.metrics import METRICS
from kvlab.track.metric_names import tracked_name
from kvlab.track.run_description import factor_param

VIEW_TAG = "mlflow.sharedViewState."
TRIALS_VIEW = "kvlab-trials"
CELLS_VIEW = "kvlab-cells"

MAX_FACTOR_COLUMNS = 8

_COLUMNS = ("kv/bytes", "speed/tpot_ms_p50")
"""Metrics beside the quality that the sweep decides by."""


def sweep_settings(sweep: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the params by which the runs of a sweep differ.

    They are its factors; of a search, the settings that its points set.
    """
    if (sweep.get("search") or {}) or tuple(sweep["factors"]) == (SEARCH_FACTOR,):
        patches = (sweep.get("patches") or {}).get(SEARCH_FACTOR, {}).values()
        settings = tuple(dict.fromkeys(name for patch in patches for name in patch))
        return settings or (SEARCH_FACTOR,)
    return tuple(factor_param(factor) for factor in sweep["factors"])


def experiment_tags(sweep: Mapping[str, Any], metric: str) -> dict[str, str]:
    """Return the tags that make MLflow's page open on a sweep's runs.

    Args:
        sweep: contents of `sweep.json`.
        metric: of the record, that the sweep decides by.
    """
    quality = tracked_name(metric)[0]
    is_higher_better = METRICS[metric].better == "higher"
    views = {
        TRIALS_VIEW: _view("Trials", _page_state(sweep, quality, is_higher_better)),
        CELLS_VIEW: _view(
            "Cells, mean over seeds", _page_state(sweep, quality, is_higher_better, grouped=True)
        ),
    }
    return {
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.experiment.primaryMetric.name": quality,
        "mlflow.experiment.primaryMetric.greaterIsBetter": json.dumps(is_higher_better),
        **{f"{VIEW_TAG}{key}": view for key, view in views.items()},
    }


def view_address(server: str, experiment: str, view: str = TRIALS_VIEW) -> str:
    """Return the address of a view; it selects model training, as the page starts with GenAI."""
    query = urlencode({"viewStateShareKey": view, "workflowType": "machine_learning"})
    return f"{server.rstrip('/')}/#/experiments/{experiment}/runs?{query}"


def _page_state(
    sweep: Mapping[str, Any], quality: str, is_higher_better: bool, grouped: bool = False
) -> dict[str, Any]:
    settings = sweep_settings(sweep)
    metrics = [_column("metrics", name) for name in (quality, *_COLUMNS)]
    params = [_column("params", name) for name in settings[:MAX_FACTOR_COLUMNS]]
    columns = [*params, _column("params", "seed"), *metrics]
    state: dict[str, Any] = {
        "orderByKey": metrics[0],
        "orderByAsc": not is_higher_better,
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": {column: _column_width(column) for column in columns},
        "runsHiddenMode": "FIRST_20_RUNS",
    }
    if grouped:
        keys = [{"mode": "tag", "groupByData": "kvlab.cell"}]
        state["selectedColumns"] = state["columnOrder"] = metrics
        state["groupBy"] = {"aggregateFunction": "average", "groupByKeys": keys}
    return state


def _column(kind: str, name: str) -> str:
    return f"{kind}.`{name}`"


def _column_width(column: str) -> int:
    """Return the width in pixels at which a column shows its name and a number."""
    return max(90, 9 * len(column.partition("`")[2]) + 20)


def _view(name: str, state: Mapping[str, Any]) -> str:
    """Return a saved view as the page stores it: name, time and compressed state."""
    text = json.dumps(state, separators=(",", ":")).encode()
    compressed = "deflate;" + base64.b64encode(zlib.compress(text, 9)).decode()
    return json.dumps({"name": name, "createdAt": 0, "state": compressed}, separators=(",", ":"))
