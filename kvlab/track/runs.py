"""Runs in MLflow: found, written whole, completed, or made anew."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.track.run_description import RunDescription

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PARAMS_PER_BATCH = 100
POINTS_PER_BATCH = 890
"""A batch may hold 1,000 things in all, of which 100 params."""

Home = tuple[str, str, str]
"""Experiment id, parent's run id, identity of the store."""


def find_runs(
    client: "MlflowClient",
    experiment: str,
    identity: str,
    *,
    key: str | None = None,
    status: str | None = None,
) -> dict[str, list["Run"]]:
    """This store's runs of an experiment, by key. Several of one key come from a kill."""
    condition = f"tags.`kvlab.store` = '{identity}'"
    if key is not None:
        condition += f" and tags.`kvlab.key` = '{key}'"
    if status is not None:
        condition += f" and attributes.status = '{status}'"
    found: dict[str, list[Run]] = {}
    token = None
    while True:
        page = client.search_runs(
            [experiment], condition, max_results=1000, page_token=token,
            order_by=["attributes.start_time ASC"],
        )  # fmt: skip
        for run in page:
            found.setdefault(run.data.tags.get("kvlab.key", ""), []).append(run)
        token = page.token
        if not token:
            return found


def write_run(
    client: "MlflowClient",
    home: Home,
    wanted: RunDescription,
    directory: Path,
    found: Sequence["Run"],
) -> bool:
    """Makes MLflow hold exactly one run as described. Returns whether anything was written.

    Written last, the tag ``kvlab.digest`` says that a run is whole. A run without it that was
    begun for the same digest is completed: points carry the record's times, so that MLflow
    takes a point which it has already for the same one.
    """
    experiment, parent, identity = home
    digest = wanted.digest(directory)
    keep = None
    stale = []
    for run in found:
        if keep is None and run.data.tags.get("kvlab.intended") == digest:
            keep = run
        else:
            stale.append(run)
    delete_runs(client, stale)
    if keep is not None and keep.data.tags.get("kvlab.digest") == digest:
        return _repair_run(client, keep, wanted, parent) or bool(stale)
    tags = {
        **wanted.tags,
        "mlflow.parentRunId": parent,
        "kvlab.key": wanted.key,
        "kvlab.store": identity,
        "kvlab.intended": digest,
    }
    if keep is None:
        keep = client.create_run(experiment, wanted.started, tags, run_name=wanted.name)
    run_id = keep.info.run_id
    if keep.data.tags.get("mlflow.parentRunId") != parent:
        client.set_tag(run_id, "mlflow.parentRunId", parent)
    for folder, path in wanted.artifacts:
        client.log_artifact(run_id, str(directory / path), folder or None)
    _log_dataset(client, run_id, wanted)
    _log_batches(client, run_id, wanted, digest)
    client.set_terminated(run_id, wanted.status, wanted.finished)
    return True


def _repair_run(client: "MlflowClient", run: "Run", wanted: RunDescription, parent: str) -> bool:
    """What can still be wrong with a whole run: its parent was made anew, or it was not ended."""
    changed = False
    if run.data.tags.get("mlflow.parentRunId") != parent:
        client.set_tag(run.info.run_id, "mlflow.parentRunId", parent)
        changed = True
    if run.info.status != wanted.status or run.info.end_time != wanted.finished:
        client.set_terminated(run.info.run_id, wanted.status, wanted.finished)
        changed = True
    return changed


def _log_batches(client: "MlflowClient", run_id: str, wanted: RunDescription, digest: str) -> None:
    """Everything in as few calls as fit; within a call MLflow stores tags last."""
    from mlflow.entities import Metric, Param, RunTag

    params = [Param(name, value) for name, value in wanted.params.items()]
    points = [Metric(name, value, time, step) for name, value, time, step in wanted.points]
    batches = max(-(-len(params) // PARAMS_PER_BATCH), -(-len(points) // POINTS_PER_BATCH), 1)
    for number in range(batches):
        some_points = points[number * POINTS_PER_BATCH : (number + 1) * POINTS_PER_BATCH]
        some_params = params[number * PARAMS_PER_BATCH : (number + 1) * PARAMS_PER_BATCH]
        tags = [RunTag("kvlab.digest", digest)] if number == batches - 1 else []
        client.log_batch(run_id, some_points, some_params, tags)


def _log_dataset(client: "MlflowClient", run_id: str, wanted: RunDescription) -> None:
    from mlflow.entities import Dataset, DatasetInput

    if wanted.dataset is not None:
        facts = wanted.dataset
        dataset = Dataset(
            name=facts["name"],
            digest=facts["digest"],
            source_type="kvlab",
            source=facts["name"],
            profile=facts["profile"],
        )
        client.log_inputs(run_id, [DatasetInput(dataset)])


def delete_runs(client: "MlflowClient", runs: Sequence["Run"]) -> None:
    """Moves runs to MLflow's trash."""
    for run in runs:
        client.delete_run(run.info.run_id)
