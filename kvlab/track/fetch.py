"""From MLflow back to a record: what a report needs of a sweep, fetched into a store of its own.

The runs carry the record's own files as artifacts, so a report made from them is the same as one
made from the store that was mirrored. Nothing that a server says becomes a path unchecked.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.errors import StoreError, TrackingError, UsageError
from kvlab.fs.atomic_files import write_atomic
from kvlab.store import Store
from kvlab.track.connection import connect, redact_uri, translate_errors
from kvlab.track.run_description import DAMAGED, PARENT, RECORD

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PARALLEL_DOWNLOADS = 8
"""Downloads."""


def fetch_record(uri: str, sweep: str, folder: Path, mirrored_by: str | None = None) -> Store:
    """A store in ``folder`` with the sweep's description and every result that MLflow has.

    A result whose mirroring was not finished is left out, so it is missing in the report.

    Args:
        uri: of MLflow.
        sweep: its name.
        folder: empty; the store is made there.
        mirrored_by: start of the identity of the store that mirrored it, where several did.

    Raises:
        UsageError: MLflow has no such sweep, or has it from several stores.
        TrackingError: MLflow cannot be reached, or lacks what a report is made of.
    """
    _refuse_new_database(uri)
    client = connect(folder / "client", uri)
    store = Store(folder / "record")
    with translate_errors(uri):
        experiment = _find_experiment(client, uri, sweep)
        parent = _find_parent(client, uri, experiment, sweep, mirrored_by)
        _fetch_sweep(client, uri, parent, sweep, store)
        runs = _find_complete_runs(client, experiment, parent)
        with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
            list(pool.map(lambda run: _fetch_trial(client, run, store), runs))
        _mark_damaged(client, parent, store)
    return store


def _refuse_new_database(uri: str) -> None:
    """Connecting would make an empty one where nothing is."""
    scheme, _, path = uri.partition(":///")
    if scheme == "sqlite" and not Path(path).exists():
        raise UsageError(f"--tracking-uri = {uri} is not a database; name one that is there")


def _find_experiment(client: "MlflowClient", uri: str, sweep: str) -> str:
    found = client.get_experiment_by_name(sweep)
    if found is None or found.lifecycle_stage == "deleted":
        tags = (e.tags.get("kvlab.sweep") for e in client.search_experiments())
        known = ", ".join(sorted(name for name in tags if name)) or "it has none yet"
        text = f"sweep = {sweep} is not in MLflow at {redact_uri(uri)} ({known})"
        raise UsageError(f"{text}; `kvlab sync {sweep} --tracking-uri URI` puts it there")
    return str(found.experiment_id)


def _find_parent(
    client: "MlflowClient", uri: str, experiment: str, sweep: str, mirrored_by: str | None
) -> "Run":
    """The sweep's own run, of the one store that is meant."""
    runs = list(_search_runs(client, experiment, f"tags.`kvlab.key` = '{PARENT}'"))
    by_store = {run.data.tags.get("kvlab.store", ""): run for run in runs}
    fitting = [one for one in by_store if one.startswith(mirrored_by or "")]
    if len(fitting) == 1:
        return by_store[fitting[0]]
    place = f"sweep = {sweep} in MLflow at {redact_uri(uri)}"
    if not by_store:
        raise UsageError(f"{place} has no run; `kvlab sync {sweep}` makes them again")
    listed = ", ".join(sorted(one[:8] for one in by_store))
    what = f"--mirrored-by = {mirrored_by} fits" if mirrored_by else "it comes from"
    count = f"{len(fitting)} of the stores" if mirrored_by else f"{len(fitting)} stores"
    raise UsageError(f"{place}: {what} {count} ({listed}); name one with --mirrored-by")


def _search_runs(client: "MlflowClient", experiment: str, condition: str) -> Iterator["Run"]:
    token = None
    while True:
        page = client.search_runs([experiment], condition, max_results=1000, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _fetch_sweep(client: "MlflowClient", uri: str, parent: "Run", sweep: str, store: Store) -> None:
    if "kvlab.record.digest" not in parent.data.tags:
        text = (
            f"sweep = {sweep} in MLflow at {redact_uri(uri)} was mirrored without its description"
        )
        raise TrackingError(f"{text}; `kvlab sync {sweep}` with this version adds it")
    directory = store.sweep_directory(sweep)
    directory.mkdir(parents=True)
    path = client.download_artifacts(parent.info.run_id, f"{RECORD}/sweep.json", str(directory))
    write_atomic(directory / "sweep.json", Path(path).read_bytes())
    name = store.sweep(sweep).get("name")
    if name != sweep:
        raise StoreError(f"sweep = {sweep} in MLflow describes {name!r}; sync it again")


def _find_complete_runs(client: "MlflowClient", experiment: str, parent: "Run") -> list["Run"]:
    """One a trial, of those that were mirrored to their end."""
    identity = parent.data.tags["kvlab.store"]
    found: dict[str, Run] = {}
    for run in _search_runs(client, experiment, f"tags.`kvlab.store` = '{identity}'"):
        tags = run.data.tags
        if "kvlab.trial" in tags and tags.get("kvlab.digest") == tags.get("kvlab.intended"):
            found.setdefault(tags["kvlab.trial"], run)
    return list(found.values())


def _fetch_trial(client: "MlflowClient", run: "Run", store: Store) -> None:
    directory = store.trial_directory(run.data.tags["kvlab.trial"])
    directory.mkdir(parents=True)
    there = {file.path for file in client.list_artifacts(run.info.run_id)}
    for name in ("result.json", "items.jsonl.gz"):
        if name in there:
            client.download_artifacts(run.info.run_id, name, str(directory))


def _mark_damaged(client: "MlflowClient", parent: "Run", store: Store) -> None:
    """Results that the mirrored store had, but could not read, are damaged here too."""
    there = {file.path for file in client.list_artifacts(parent.info.run_id, RECORD)}
    if f"{RECORD}/{DAMAGED}" not in there:
        return
    place = store.path / DAMAGED
    place.mkdir()
    path = client.download_artifacts(parent.info.run_id, f"{RECORD}/{DAMAGED}", str(place))
    for trial in json.loads(Path(path).read_bytes()):
        result = store.trial_directory(str(trial)) / "result.json"
        if not result.exists():
            write_atomic(result, "damaged\n")
