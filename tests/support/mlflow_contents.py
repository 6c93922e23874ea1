"""Read what MLflow holds of a sweep, in a form in which two databases can be compared."""

from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from kvlab.track.run_description import PARENT


def store_client(store: Path) -> MlflowClient:
    """Return a client of the database in a store."""
    return MlflowClient(tracking_uri=f"sqlite:///{store}/mlflow.db")


def store_runs(store: Path, sweep: str = "made") -> list[Any]:
    """Return all runs of a sweep in the database of a store."""
    client = store_client(store)
    experiment = client.get_experiment_by_name(sweep)
    assert experiment is not None, f"{store} has no {sweep}"
    return list(client.search_runs([experiment.experiment_id], max_results=1000))


def read_contents(uri: str, sweep: str) -> dict[str, Any]:
    """Return an experiment by run names, without the ids that MLflow gives.

    Of each run: status and times, params, every point of every metric with its time and step (of
    the sweep's own run the last values), tags, the bytes of every artifact, data sets.
    """
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(sweep)
    assert experiment is not None, f"{uri} has no {sweep}"
    runs = {
        run.info.run_id: run
        for run in client.search_runs([experiment.experiment_id], max_results=1000)
    }
    found: dict[str, Any] = {}
    for run_id, run in runs.items():
        tags = dict(run.data.tags)
        parent = tags.pop("mlflow.parentRunId", None)
        tags["parent"] = runs[parent].info.run_name if parent else ""
        history = {
            key: [(m.value, m.timestamp, m.step) for m in client.get_metric_history(run_id, key)]
            for key in run.data.metrics
        }
        if tags.get("kvlab.key") == PARENT:  # a stopped sweep has numbers of its own
            history = {key: [(value, 0, 0)] for key, value in run.data.metrics.items()}
        datasets = [entry.dataset.digest for entry in run.inputs.dataset_inputs]
        info = (run.info.status, run.info.start_time, run.info.end_time)
        name = run.info.run_name
        assert name not in found, f"one run a cell and seed, and two are called {name}"
        found[name] = (info, run.data.params, history, tags, _read_artifacts(client, run), datasets)
    return found


def _read_artifacts(client: MlflowClient, run: Any) -> dict[str, bytes]:
    """Return a run's artifacts, from its folder or through the server that stores them."""
    uri = run.info.artifact_uri.removeprefix("file://")
    if "://" in uri or uri.startswith("mlflow-artifacts:"):
        uri = client.download_artifacts(run.info.run_id, "")
    return read_files(Path(uri))


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file in a folder, by its path in there."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
