"""Fetch what a report needs of a sweep from MLflow into a store of its own.

The runs carry the record's files as artifacts, so a report made from them equals one made from the
store that was mirrored. Names from a server are checked before they become paths.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.errors import UsageError
from kvlab.fs.atomic_files import write_atomic
from kvlab.humanize import redact_url
from kvlab.store import DETAIL_FILES, Store
from kvlab.store.timings import TIMINGS_FILE
from kvlab.track.connection import connect, translate_errors
from kvlab.track.run_description import DAMAGED, PARENT, RECORD
from kvlab.track.runs import iter_runs

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PARALLEL_DOWNLOADS = 8


def fetch_record(uri: str, sweep: str, folder: Path, mirrored_by: str | None = None) -> Store:
    """Return a store in ``folder`` with a sweep's description and every result that MLflow has.

    A result whose mirroring is incomplete is left out, so it is missing in the report.

    Args:
        folder: empty; the store is created there.
        mirrored_by: first digits of the id of the store that mirrored the sweep; needed if
            several did.

    Raises:
        UsageError: MLflow has no such sweep, or has it from several stores.
        TrackingError: MLflow cannot be reached.
    """
    scheme, _, file = uri.partition(":///")
    if scheme == "sqlite" and not Path(file).exists():  # connecting would create it
        raise UsageError(f"--tracking-uri = {uri} is not a database; name an existing one")
    client = connect(folder / "client", uri)
    store = Store(folder / "record")
    with translate_errors(uri):
        parent = _find_parent(client, uri, sweep, mirrored_by)
        directory = store.sweep_directory(sweep)
        directory.mkdir(parents=True)
        listed = {file.path for file in client.list_artifacts(parent.info.run_id, RECORD)}
        for name in ("sweep.json", TIMINGS_FILE, DAMAGED):
            path = f"{RECORD}/{name}"
            if path in listed:
                file = client.download_artifacts(parent.info.run_id, path, str(directory))
                write_atomic(directory / name, Path(file).read_bytes())
        store.sweep(sweep)  # raises if it is another
        condition = f"tags.`kvlab.store` = '{parent.data.tags['kvlab.store']}'"
        runs: dict[str, Run] = {}  # one for each trial that was mirrored completely
        for run in iter_runs(client, parent.info.experiment_id, condition):
            if {"kvlab.trial", "kvlab.digest"} <= run.data.tags.keys():
                runs.setdefault(run.data.tags["kvlab.trial"], run)
        with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
            list(pool.map(lambda run: _fetch_trial(client, run, store), runs.values()))
        damaged = directory / DAMAGED
        for trial in json.loads(damaged.read_bytes()) if damaged.exists() else ():
            result = store.trial_directory(str(trial)) / "result.json"
            if not result.exists():
                write_atomic(result, "damaged\n")
        damaged.unlink(missing_ok=True)
    return store


def _find_parent(client: "MlflowClient", uri: str, sweep: str, mirrored_by: str | None) -> "Run":
    """Return the sweep's own run, of the one store that ``mirrored_by`` matches."""
    location = f"sweep = {sweep} in MLflow at {redact_url(uri)}"
    experiment = client.get_experiment_by_name(sweep)
    if experiment is None or experiment.lifecycle_stage == "deleted":
        tags = (e.tags.get("kvlab.sweep") for e in client.search_experiments())
        names = ", ".join(sorted(name for name in tags if name)) or "it has none yet"
        text = f"sweep = {sweep} is not in MLflow at {redact_url(uri)} ({names})"
        raise UsageError(f"{text}; `kvlab sync {sweep} --tracking-uri URI` puts it there")
    runs = iter_runs(client, experiment.experiment_id, f"tags.`kvlab.key` = '{PARENT}'")
    by_store = {r.data.tags["kvlab.store"]: r for r in runs if "kvlab.digest" in r.data.tags}
    matches = [store for store in by_store if store.startswith(mirrored_by or "")]
    if len(matches) == 1:
        return by_store[matches[0]]
    if not by_store:
        raise UsageError(f"{location} has no complete run; `kvlab sync {sweep}` makes them again")
    stores = ", ".join(sorted(store[:8] for store in by_store))
    text = f"it comes from {len(matches)} stores"
    if mirrored_by:
        text = f"--mirrored-by = {mirrored_by} fits {len(matches)} of the stores"
    raise UsageError(f"{location}: {text} ({stores}); name one with --mirrored-by")


def _fetch_trial(client: "MlflowClient", run: "Run", store: Store) -> None:
    directory = store.trial_directory(run.data.tags["kvlab.trial"])
    directory.mkdir(parents=True)
    artifacts = {file.path for file in client.list_artifacts(run.info.run_id)}
    for name in ("result.json", *DETAIL_FILES):
        if name in artifacts:
            client.download_artifacts(run.info.run_id, name, str(directory))
