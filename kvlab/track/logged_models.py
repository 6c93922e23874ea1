"""Log the weights of a sweep's trainings as MLflow's logged models.

A model holds ``model.safetensors`` and kvlab's ``config.json``. Trials that share a training, as
those that differ in serving alone, share its model.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvlab.store import Store
from kvlab.track.metric_names import tracked_metrics
from kvlab.track.run_description import (
    MAX_PARAM_LENGTH,
    flatten_settings,
    to_milliseconds,
    truncate,
)
from kvlab.track.runs import KnownRun, RunScope

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

WEIGHTS = "final/model.safetensors"
"""Weights of a finished training, in its folder; ``kvlab gc`` may have deleted them."""

_REFUSED_IN_NAMES = re.compile(r"[/:.%\"']")


def log_models(
    client: "MlflowClient", store: Store, scope: RunScope, runs: Sequence[KnownRun]
) -> int:
    """Make MLflow hold one logged model for every training whose weights the store has.

    A model that a kill left incomplete, or whose run is gone, is made anew.

    Args:
        runs: of the sweep's trials.

    Returns:
        How many models were written.
    """
    by_training: dict[str, list[KnownRun]] = {}
    for run in runs:
        if run.tags.get("kvlab.status") == "done":
            by_training.setdefault(run.tags["kvlab.training"], []).append(run)
    known = _find_models(client, scope, {run.id for run in runs})
    written = 0
    for training, group in by_training.items():
        if not (store.training_directory(training) / WEIGHTS).exists():
            continue
        model = known.get(training)
        if model is None:
            first = min(
                group, key=lambda run: run.tags["mlflow.runName"]
            )  # whatever MLflow's order
            model = _write_model(client, store, scope, training, first)
            written += 1
        for run in group:
            _link_model(client, run, model)
    return written


def _find_models(
    client: "MlflowClient", scope: RunScope, runs: set[str]
) -> "Mapping[str, LoggedModel]":
    """Return the store's complete models by training; delete those of runs that are gone."""
    models: dict[str, LoggedModel] = {}
    for model in list(_iter_models(client, scope)):
        training = model.tags.get("kvlab.training", "")
        is_complete = str(model.status) == "READY" and model.source_run_id in runs
        if is_complete and training not in models:
            models[training] = model
        else:
            client.delete_logged_model(model.model_id)
    return models


def _iter_models(client: "MlflowClient", scope: RunScope) -> "Iterator[LoggedModel]":
    condition, token = f"tags.`kvlab.store` = '{scope.store_id}'", None
    while True:
        page = client.search_logged_models([scope.experiment], condition, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _write_model(
    client: "MlflowClient", store: Store, scope: RunScope, training: str, run: KnownRun
) -> "LoggedModel":
    result = store.result(run.tags["kvlab.trial"])
    assert result is not None, "its run was made from it"
    params = {
        name: truncate(value, MAX_PARAM_LENGTH)
        for name, value in flatten_settings({"model": result["experiment"]["model"]})
    }
    name = _REFUSED_IN_NAMES.sub("-", f"{run.tags['kvlab.cell']} seed {run.tags['kvlab.seed']}")
    tags = {
        "kvlab.store": scope.store_id,
        "kvlab.training": training,
        "kvlab.data.digest": run.tags.get("kvlab.data.digest", ""),
    }
    model = client.create_logged_model(scope.experiment, name, run.id, tags, params, "GPT")
    folder = store.training_directory(training)
    client.log_model_artifact(model.model_id, str(folder / "config.json"))
    client.log_model_artifact(model.model_id, str(folder / WEIGHTS))
    _log_quality(client, result, run, model.model_id)
    return client.finalize_logged_model(model.model_id, "READY")


def _log_quality(
    client: "MlflowClient", result: Mapping[str, Any], run: KnownRun, model_id: str
) -> None:
    """Make the losses and accuracies of a run those of its model. The run has these points."""
    from mlflow.entities import Metric

    finished = to_milliseconds(result["provenance"]["finished"])
    last = int(result["training_record"]["steps"])
    points = [
        Metric(name, value, finished, last, model_id=model_id)
        for name, value, step in tracked_metrics(result)
        if name.startswith("quality/") and step is None
    ]
    client.log_batch(run.id, points)


def _link_model(client: "MlflowClient", run: KnownRun, model: "LoggedModel") -> None:
    """Make a model an output of a run."""
    from mlflow.entities import LoggedModelOutput

    outputs = client.get_run(run.id).outputs
    linked = {output.model_id for output in outputs.model_outputs} if outputs else set()
    if model.model_id not in linked:
        client.log_outputs(run.id, [LoggedModelOutput(model.model_id, 0)])
