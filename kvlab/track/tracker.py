"""`Tracker`: mirror sweeps of a store into MLflow. Used by drivers and `kvlab sync`."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.analysis.study import Study
from kvlab.errors import StoreError
from kvlab.fs.atomic_files import file_sha256, read_regular
from kvlab.fs.sealed_files import seal_json
from kvlab.store import Store
from kvlab.store.store import list_cells
from kvlab.store.timings import TIMINGS_FILE, read_timings
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
    RECORD_DIGEST,
    TIMINGS_DIGEST,
    RunDescription,
    cell_name,
    describe_run,
    find_start_ms,
    run_key,
    truncate,
)
from kvlab.track.runs import KnownRun, RunScope, delete_runs, find_runs, log_models, write_run
from kvlab.track.sweep_summary import (
    describe_sweep,
    experiment_tags,
    find_best_cell,
    measure_sweep,
    summarize_states,
)

NOTE = "mlflow.note.content"
"""Tag of a run or an experiment that MLflow's page shows as its description."""


@dataclass(frozen=True)
class MirrorSummary:
    """What a call of `Tracker.mirror` did.

    Attributes:
        experiment: MLflow's id of the sweep's experiment.
        written, unchanged, deleted: number of runs.
        models: number of logged models that were written.
    """

    sweep: str
    experiment: str
    written: int = 0
    unchanged: int = 0
    deleted: int = 0
    models: int = 0


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

        The experiment gets one parent run, with numbers and the answer of the sweep, and below it
        one run for every cell and seed that has ended. Runs that are up to date are not touched,
        so a second call changes nothing. A run that a kill left incomplete is completed, one whose
        result has changed is made anew, as are all that an earlier version of kvlab made, and runs
        of this store that the record does not have are deleted.

        Args:
            report: folder of its report, logged with the parent run; None leaves that unchanged.

        Raises:
            UsageError: the store has no such sweep.
            TrackingError: MLflow cannot be reached or refuses.
        """
        sweep = self._store.sweep(sweep_name)
        with self._exclusive():
            experiment = self._get_experiment(sweep)
            runs = find_runs(self._client, experiment, self._store_id)
            parent = self._get_parent(experiment, sweep, runs.pop(PARENT, []))
            scope = RunScope(experiment, parent.id, self._store_id)
            written, unchanged, ended = 0, 0, parent.started
            for run in self._describe_runs(sweep):
                if write_run(self._client, scope, run, self._directory(run), runs.pop(run.key, [])):
                    written += 1
                else:
                    unchanged += 1
                ended = max(ended, run.finished)
            stale = [run for group in runs.values() for run in group]
            delete_runs(self._client, stale)
            self._update_parent(parent, sweep, ended, None if report is None else Path(report))
        return MirrorSummary(sweep_name, experiment, written, unchanged, len(stale))

    def log_models(self, sweep_name: str) -> int:
        """Log the weights of a mirrored sweep's trainings as logged models; return how many.

        Raises:
            TrackingError: MLflow cannot be reached or refuses.
        """
        with self._exclusive():
            experiment = self._get_experiment(self._store.sweep(sweep_name))
            runs = find_runs(self._client, experiment, self._store_id)
            parent = next(iter(runs.pop(PARENT, [])), None)
            if parent is None:
                return 0
            scope = RunScope(experiment, parent.id, self._store_id)
            known = [run for group in runs.values() for run in group]
            return log_models(self._client, self._store, scope, known)

    def mirror_trial(self, sweep_name: str, trial_id: str) -> None:
        """Mirror one trial that has just ended, without looking at the others.

        Raises:
            UsageError: the store has no such sweep.
            TrackingError: MLflow cannot be reached or refuses.
        """
        sweep = self._store.sweep(sweep_name)
        with self._exclusive():
            experiment = self._get_experiment(sweep)
            parents = find_runs(self._client, experiment, self._store_id, key=PARENT)
            parent = self._get_parent(experiment, sweep, parents.get(PARENT, []))
            if "search" not in sweep:  # whose description grows with every trial
                self._log_description(parent, sweep)
            scope = RunScope(experiment, parent.id, self._store_id)
            for run in self._describe_runs(sweep, trial_id):
                known = find_runs(self._client, experiment, self._store_id, key=run.key)
                found = known.get(run.key, [])
                write_run(self._client, scope, run, self._directory(run), found)

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
                    self._client.set_terminated(run.id, "KILLED", run.started)
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
            return str(self._client.create_experiment(name, location, {"kvlab.sweep": name}))
        if experiment.lifecycle_stage == "deleted":
            self._client.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)

    def _get_parent(
        self, experiment: str, sweep: Mapping[str, Any], parents: Sequence[KnownRun]
    ) -> KnownRun:
        """Return the first of ``parents``, without the others, or a new parent run."""
        if parents:
            delete_runs(self._client, parents[1:])
            return parents[0]
        tags = {"kvlab.key": PARENT, "kvlab.store": self._store_id, "kvlab.sweep": sweep["name"]}
        started = find_start_ms(self._store, sweep)
        run = self._client.create_run(experiment, started, tags, run_name=sweep["name"])
        return KnownRun.of(run)

    def _describe_runs(
        self, sweep: Mapping[str, Any], only: str | None = None
    ) -> Iterator[RunDescription]:
        """Iterate over the runs of every cell and seed with a readable result, each key once."""
        keys = set()
        timings = self._store.timings(sweep["name"])
        for cell in list_cells(sweep):
            for trial in cell["trials"].values():
                key = run_key(trial, cell["levels"])
                if key in keys or (only is not None and trial != only):
                    continue
                try:
                    result = self._store.result(trial, timings)
                except StoreError:  # damaged, so the trial will run again
                    continue
                if result is not None:
                    keys.add(key)
                    directory = self._store.trial_directory(trial)
                    yield describe_run(sweep, cell["levels"], result, directory)

    def _directory(self, description: RunDescription) -> Path:
        return self._store.trial_directory(description.tags["kvlab.trial"])

    def _update_parent(
        self, parent: KnownRun, sweep: Mapping[str, Any], ended: int, report: Path | None
    ) -> None:
        """Update what the sweep's own run and the experiment say, where it has changed."""
        self._log_description(parent, sweep)
        trials = self._store.sweep_trials(sweep["name"])
        statuses = {trial: self._store.status(trial) or "missing" for trial in trials}
        self._log_damaged(parent, [t for t, status in statuses.items() if status == "damaged"])
        states: Counter[str] = Counter(statuses.values())
        tags = _sweep_tags(sweep, states)
        if report is not None:
            tags["kvlab.report.digest"] = _hash_folder(report)
            if parent.tags.get("kvlab.report.digest") != tags["kvlab.report.digest"]:
                self._client.log_artifacts(parent.id, str(report), "report")
        if report is not None or parent.tags.get("kvlab.states") != tags["kvlab.states"]:
            tags[NOTE] = truncate(describe_sweep(sweep, states, report), MAX_TAG_LENGTH)
        study = Study.load(self._store, sweep["name"])
        if (best := find_best_cell(study)) is not None:
            levels = dict(zip(study.factors, best, strict=True))
            tags["kvlab.best"] = cell_name(sweep, levels)
        for name, value in tags.items():
            if parent.tags.get(name) != value:
                self._client.set_tag(parent.id, name, value)
        self._update_experiment(sweep, study.primary_metric, tags.get(NOTE))
        status = _sweep_status(states, self._store.is_driven(sweep["name"]))
        if status != "RUNNING":  # while it runs, only its first and last trial come here
            self._log_metrics(parent, measure_sweep(study), ended)
        self._update_status(parent, status, ended)

    def _update_status(self, parent: KnownRun, status: str, ended: int) -> None:
        if status == "RUNNING":
            if parent.status != status:
                self._client.update_run(parent.id, status)
        elif (parent.status, parent.ended) != (status, ended):
            self._client.set_terminated(parent.id, status, ended)

    def _log_metrics(self, parent: KnownRun, metrics: Mapping[str, float], ended: int) -> None:
        """Log the numbers of the sweep that have changed.

        Their time is that of the last result; a correction without a newer result comes after it.
        """
        from mlflow.entities import Metric

        known = self._client.get_run(parent.id).data.metrics
        changed = {name: value for name, value in metrics.items() if known.get(name) != value}
        times = [
            point.timestamp + 1
            for name in changed
            if name in known
            for point in self._client.get_metric_history(parent.id, name)
        ]
        time = max([ended, *times])
        points = [Metric(name, value, time, 0) for name, value in changed.items()]
        if points:
            self._client.log_batch(parent.id, points)

    def _update_experiment(self, sweep: Mapping[str, Any], metric: str, note: str | None) -> None:
        """Set the experiment's tags, by which MLflow's page opens on the sweep's runs."""
        experiment = self._client.get_experiment_by_name(sweep["name"])
        assert experiment is not None, "it was found or created before its runs were"
        tags = {"kvlab.sweep": sweep["name"], **experiment_tags(sweep, metric)}
        if note is not None:
            tags[NOTE] = note
        for name, value in tags.items():
            if experiment.tags.get(name) != value:
                self._client.set_experiment_tag(experiment.experiment_id, name, value)

    def _log_description(self, parent: KnownRun, sweep: Mapping[str, Any]) -> None:
        """Log the sweep's description and later times, so that reports need MLflow alone."""
        directory = self._store.sweep_directory(sweep["name"])
        files = {"sweep.json": (seal_json(sweep), RECORD_DIGEST)}
        if read_timings(directory):  # there and intact
            files[TIMINGS_FILE] = (read_regular(directory / TIMINGS_FILE), TIMINGS_DIGEST)
        for name, (content, tag) in files.items():
            digest = hashlib.sha256(content).hexdigest()
            if parent.tags.get(tag) != digest:
                self._client.log_text(parent.id, content.decode(), f"{RECORD}/{name}")
                self._client.set_tag(parent.id, tag, digest)

    def _log_damaged(self, parent: KnownRun, trials: Sequence[str]) -> None:
        """Log which results cannot be read, so that reports made from MLflow say so too."""
        text = json.dumps(trials)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest != parent.tags.get("kvlab.damaged.digest", _EMPTY_LIST_DIGEST):
            self._client.log_text(parent.id, text, f"{RECORD}/{DAMAGED}")
            self._client.set_tag(parent.id, "kvlab.damaged.digest", digest)


_EMPTY_LIST_DIGEST = hashlib.sha256(b"[]").hexdigest()


def _sweep_status(states: Mapping[str, int], is_driven: bool) -> str:
    if states.get("missing") or states.get("damaged"):
        return "RUNNING" if is_driven else "KILLED"
    return "FAILED" if states.get("failed") else "FINISHED"


def _sweep_tags(sweep: Mapping[str, Any], states: Mapping[str, int]) -> dict[str, str]:
    tags = {
        "kvlab.states": summarize_states(states),
        "kvlab.seeds": json.dumps(sweep["seeds"]),
        "kvlab.baseline": json.dumps(sweep["baseline"]),
        "kvlab.yaml_sha256": str(sweep.get("yaml_sha256", "")),
        **{f"kvlab.levels.{f}": json.dumps(names) for f, names in sweep["factors"].items()},
        "mlflow.source.name": str(sweep.get("command", "")),
        "mlflow.source.type": "JOB",
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
