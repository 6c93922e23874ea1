"""`Tracker`: mirror sweeps of a store into MLflow. Used by drivers and `kvlab sync`."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import StoreError
from kvlab.fs.atomic_files import file_sha256
from kvlab.store import Store
from kvlab.store.store import list_cells
from kvlab.track.connection import (
    connect,
    hold_mlflow_lock,
    is_server,
    read_store_id,
    tracking_uri,
    translate_errors,
)
from kvlab.track.run_description import (
    DAMAGED,
    MAX_TAG_LENGTH,
    PARENT,
    RECORD,
    RunDescription,
    describe_run,
    find_start_ms,
    truncate,
)
from kvlab.track.runs import RunScope, delete_runs, find_runs, write_run

if TYPE_CHECKING:
    from mlflow.entities import Run


@dataclass(frozen=True)
class MirrorSummary:
    """What a call of `Tracker.mirror` did: how many runs were written, unchanged and deleted."""

    sweep: str
    written: int = 0
    unchanged: int = 0
    deleted: int = 0


class Tracker:
    """Mirror sweeps of one store into MLflow. Several processes may; a lock serializes them.

    Args:
        uri: of MLflow; default MLFLOW_TRACKING_URI, else ``mlflow.db`` in the store, with
            artifacts in ``mlartifacts``.

    Raises:
        TrackingError: MLflow cannot be reached or refuses.
    """

    def __init__(self, store_path: str | os.PathLike[str], uri: str | None = None):
        self._store = Store(Path(store_path).absolute())
        self.uri = tracking_uri(self._store.path, uri)
        self._client = connect(self._store.path, self.uri)
        self._store_id = read_store_id(self._store.path)

    def mirror(self, sweep_name: str, report: str | Path | None = None) -> MirrorSummary:
        """Bring a sweep's experiment up to date with the record.

        The experiment gets one parent run, and below it one run for every cell and seed that has
        ended. Runs that are up to date are not touched, so a second call changes nothing. A run
        that a kill left incomplete is completed, one whose result has changed is made anew, and
        runs of this store that the record does not have are deleted.

        Args:
            report: folder of its report, logged with the parent run; None leaves that unchanged.

        Raises:
            UsageError: the store has no such sweep.
            TrackingError: MLflow cannot be reached or refuses.
        """
        sweep = self._store.sweep(sweep_name)
        with self._exclusive():
            descriptions = self._describe_runs(sweep)
            experiment = self._get_experiment(sweep)
            runs = find_runs(self._client, experiment, self._store_id)
            parent = self._get_parent(
                experiment, sweep, runs.get(PARENT, []), descriptions.values()
            )
            scope = RunScope(experiment, parent.info.run_id, self._store_id)
            written = sum(
                write_run(
                    self._client,
                    scope,
                    description,
                    self._directory(description),
                    runs.get(key, []),
                )
                for key, description in descriptions.items()
            )
            stale = [
                run
                for key, group in runs.items()
                if key not in descriptions and key != PARENT
                for run in group
            ]
            delete_runs(self._client, stale)
            self._update_parent(parent, sweep, descriptions.values(), report)
        return MirrorSummary(sweep_name, written, len(descriptions) - written, len(stale))

    def mirror_trial(self, sweep_name: str, trial_id: str) -> None:
        """Mirror one trial that has just ended, without looking at the others.

        Raises:
            UsageError: the store has no such sweep.
            TrackingError: MLflow cannot be reached or refuses.
        """
        sweep = self._store.sweep(sweep_name)
        with self._exclusive():
            descriptions = self._describe_runs(sweep, trial_id)
            experiment = self._get_experiment(sweep)
            for key, description in descriptions.items():
                parents = find_runs(self._client, experiment, self._store_id, key=PARENT)
                parent = self._get_parent(experiment, sweep, parents.get(PARENT, []), [description])
                self._log_description(parent, sweep)
                scope = RunScope(experiment, parent.info.run_id, self._store_id)
                runs = find_runs(self._client, experiment, self._store_id, key=key).get(key, [])
                write_run(self._client, scope, description, self._directory(description), runs)

    def close_zombies(self) -> int:
        """Terminate this store's runs whose sweep no driver runs; return how many they were."""
        closed = 0
        with self._exclusive():
            for experiment in self._client.search_experiments():
                sweep = experiment.tags.get("kvlab.sweep")
                if sweep is None or self._store.is_driven(sweep):
                    continue
                running = find_runs(
                    self._client, experiment.experiment_id, self._store_id, status="RUNNING"
                )
                for run in (run for group in running.values() for run in group):
                    # A time from the record; `mirror` sets a better one if the result is there.
                    end = run.info.start_time
                    self._client.set_terminated(run.info.run_id, "KILLED", end)
                    closed += 1
        return closed

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the store's MLflow lock, with MLflow's errors translated."""
        with hold_mlflow_lock(self._store.path), translate_errors(self.uri):
            yield

    def _get_experiment(self, sweep: Mapping[str, Any]) -> str:
        """Return the id of the sweep's experiment, which is created or restored if necessary."""
        name = sweep["name"]
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            folder = self._store.path / "mlartifacts" / name
            location = None if is_server(self.uri) else folder.as_uri()
            tags = {
                "kvlab.sweep": name,
                "mlflow.note.content": truncate(sweep["question"], MAX_TAG_LENGTH),
            }
            return str(self._client.create_experiment(name, location, tags))
        if experiment.lifecycle_stage == "deleted":
            self._client.restore_experiment(experiment.experiment_id)
        if experiment.tags.get("kvlab.sweep") != name:
            self._client.set_experiment_tag(experiment.experiment_id, "kvlab.sweep", name)
        return str(experiment.experiment_id)

    def _get_parent(
        self,
        experiment: str,
        sweep: Mapping[str, Any],
        parents: Sequence["Run"],
        descriptions: Collection[RunDescription],
    ) -> "Run":
        """Return the first of ``parents``, without the others, or a new parent run."""
        if parents:
            delete_runs(self._client, parents[1:])
            return parents[0]
        tags = {"kvlab.key": PARENT, "kvlab.store": self._store_id, "kvlab.sweep": sweep["name"]}
        started = find_start_ms(self._store, sweep, descriptions)
        return self._client.create_run(experiment, started, tags, run_name=sweep["name"])

    def _describe_runs(
        self, sweep: Mapping[str, Any], only: str | None = None
    ) -> dict[str, RunDescription]:
        """Return the runs, by key, of every cell and seed with a readable result."""
        runs: dict[str, RunDescription] = {}
        for cell in list_cells(sweep):
            for trial in cell["trials"].values():
                if only is not None and trial != only:
                    continue
                try:
                    result = self._store.result(trial)
                except StoreError:  # damaged, so the trial will run again
                    continue
                if result is not None:
                    directory = self._store.trial_directory(trial)
                    run = describe_run(sweep, cell["levels"], result, directory)
                    runs[run.key] = run
        return runs

    def _directory(self, description: RunDescription) -> Path:
        return self._store.trial_directory(description.tags["kvlab.trial"])

    def _update_parent(
        self,
        parent: "Run",
        sweep: Mapping[str, Any],
        descriptions: Collection[RunDescription],
        report: str | Path | None,
    ) -> None:
        """Update the parent's description, report, tags and status, if any of them has changed."""
        run_id, tags = parent.info.run_id, parent.data.tags
        self._log_description(parent, sweep)
        if report is not None:
            digest = _hash_folder(Path(report))
            if tags.get("kvlab.report.digest") != digest:
                self._client.log_artifacts(run_id, str(report), "report")
                self._client.set_tag(run_id, "kvlab.report.digest", digest)
        trials = self._store.sweep_trials(sweep["name"])
        statuses = {trial: self._store.status(trial) or "missing" for trial in trials}
        self._log_damaged(parent, [t for t, status in statuses.items() if status == "damaged"])
        states: Counter[str] = Counter(statuses.values())
        for name, value in _parent_tags(sweep, states).items():
            if tags.get(name) != value:
                self._client.set_tag(run_id, name, value)
        self._update_status(parent, sweep, states, descriptions)

    def _update_status(
        self,
        parent: "Run",
        sweep: Mapping[str, Any],
        states: Mapping[str, int],
        descriptions: Collection[RunDescription],
    ) -> None:
        run_id = parent.info.run_id
        status = _parent_status(states, self._store.is_driven(sweep["name"]))
        ended = max(
            (description.finished for description in descriptions), default=parent.info.start_time
        )
        if status == "RUNNING":
            if parent.info.status != status:
                self._client.update_run(run_id, status)
        elif (parent.info.status, parent.info.end_time) != (status, ended):
            self._client.set_terminated(run_id, status, ended)

    def _log_description(self, parent: "Run", sweep: Mapping[str, Any]) -> None:
        """Log the sweep's description, so that reports can be made from MLflow alone."""
        path = self._store.sweep_directory(sweep["name"]) / "sweep.json"
        digest = file_sha256(path)
        if parent.data.tags.get("kvlab.record.digest") != digest:
            self._client.log_artifact(parent.info.run_id, str(path), RECORD)
            self._client.set_tag(parent.info.run_id, "kvlab.record.digest", digest)

    def _log_damaged(self, parent: "Run", trials: Sequence[str]) -> None:
        """Log which results cannot be read, so that reports made from MLflow say so too."""
        text = json.dumps(trials)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest != parent.data.tags.get("kvlab.damaged.digest", _EMPTY_LIST_DIGEST):
            self._client.log_text(parent.info.run_id, text, f"{RECORD}/{DAMAGED}")
            self._client.set_tag(parent.info.run_id, "kvlab.damaged.digest", digest)


_EMPTY_LIST_DIGEST = hashlib.sha256(b"[]").hexdigest()


def _parent_status(states: Mapping[str, int], is_driven: bool) -> str:
    if states.get("missing") or states.get("damaged"):
        return "RUNNING" if is_driven else "KILLED"
    return "FAILED" if states.get("failed") else "FINISHED"


def _parent_tags(sweep: Mapping[str, Any], states: Mapping[str, int]) -> dict[str, str]:
    summary = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    tags = {
        "kvlab.states": summary,
        "kvlab.seeds": json.dumps(sweep["seeds"]),
        "kvlab.baseline": json.dumps(sweep["baseline"]),
        "kvlab.yaml_sha256": str(sweep.get("yaml_sha256", "")),
        **{f"kvlab.levels.{f}": json.dumps(names) for f, names in sweep["factors"].items()},
        "mlflow.source.name": str(sweep.get("command", "")),
        "mlflow.source.type": "JOB",
        "mlflow.note.content": f"{sweep['question']}\n\n{summary}",
    }
    return {name: truncate(value, MAX_TAG_LENGTH) for name, value in tags.items() if value}


def _hash_folder(folder: Path) -> str:
    """Return the sha256 of every file's name and contents."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()
