"""`Tracker`: MLflow as a projection of the record, made and kept up to date by the driver alone."""

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
from kvlab.track.runs import delete_runs, find_runs, write_run

if TYPE_CHECKING:
    from mlflow.entities import Run


@dataclass(frozen=True)
class MirrorSummary:
    """What a mirroring did: runs written, found as they should be, and taken away."""

    sweep: str
    written: int = 0
    unchanged: int = 0
    deleted: int = 0


class Tracker:
    """Mirrors sweeps of one store into MLflow. Several processes may: they take turns.

    Args:
        store_path: of the store.
        uri: of MLflow; default MLFLOW_TRACKING_URI, else ``mlflow.db`` in the store, with
            artifacts in ``mlartifacts``.

    Raises:
        TrackingError: MLflow cannot be reached or refuses.
    """

    def __init__(self, store_path: str | os.PathLike[str], uri: str | None = None):
        self._store = Store(Path(store_path).absolute())
        self.uri = tracking_uri(self._store.path, uri)
        self._client = connect(self._store.path, self.uri)
        self._identity = read_store_id(self._store.path)

    def mirror(self, sweep_name: str, report: str | Path | None = None) -> MirrorSummary:
        """Brings one sweep's experiment up to date with the record.

        One parent run, and under it one run for every cell and seed that has ended. What is
        there and right is not touched: a second call changes nothing. A run that a kill left
        half made is completed; one whose result has changed is made anew; of this store's runs
        those that the record does not have are deleted.

        Args:
            sweep_name: of the sweep.
            report: folder of its report, kept with the parent run. None leaves what is there.

        Raises:
            UsageError: the store has no such sweep.
            TrackingError: MLflow cannot be reached or refuses.
        """
        sweep = self._store.sweep(sweep_name)
        with self._turn():
            rows = self._described(sweep)
            experiment = self._experiment(sweep)
            runs = find_runs(self._client, experiment, self._identity)
            parent = self._parent(experiment, sweep, runs.get(PARENT, []), rows.values())
            home = (experiment, parent.info.run_id, self._identity)
            written = sum(
                write_run(self._client, home, row, self._directory(row), runs.get(key, []))
                for key, row in rows.items()
            )
            stale = [r for key, all_ in runs.items() if key not in rows for r in all_]
            stale = [run for run in stale if run.data.tags.get("kvlab.key") != PARENT]
            delete_runs(self._client, stale)
            self._finish(parent, sweep, rows.values(), report)
        return MirrorSummary(sweep_name, written, len(rows) - written, len(stale))

    def mirror_trial(self, sweep_name: str, trial_id: str) -> None:
        """Mirrors one trial that has just ended, without looking at the others.

        Raises:
            UsageError: the store has no such sweep.
            TrackingError: MLflow cannot be reached or refuses.
        """
        sweep = self._store.sweep(sweep_name)
        with self._turn():
            rows = self._described(sweep, trial_id)
            experiment = self._experiment(sweep)
            for key, row in rows.items():
                found = find_runs(self._client, experiment, self._identity, key=PARENT)
                parent = self._parent(experiment, sweep, found.get(PARENT, []), [row])
                self._keep_description(parent, sweep)
                home = (experiment, parent.info.run_id, self._identity)
                runs = find_runs(self._client, experiment, self._identity, key=key).get(key, [])
                write_run(self._client, home, row, self._directory(row), runs)

    def close_zombies(self) -> int:
        """Ends this store's runs that say they run though no driver does; returns how many."""
        closed = 0
        with self._turn():
            for experiment in self._client.search_experiments():
                sweep = experiment.tags.get("kvlab.sweep")
                if sweep is None or self._store.is_driven(sweep):
                    continue
                running = find_runs(
                    self._client, experiment.experiment_id, self._identity, status="RUNNING"
                )
                for run in (run for group in running.values() for run in group):
                    # At a time from the record; `mirror` knows better, if the record is there.
                    end = run.info.start_time
                    self._client.set_terminated(run.info.run_id, "KILLED", end)
                    closed += 1
        return closed

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One process at a time looks what is there and writes what is not."""
        with hold_mlflow_lock(self._store.path), translate_errors(self.uri):
            yield

    def _experiment(self, sweep: Mapping[str, Any]) -> str:
        """The sweep's experiment, made if it is not there, restored if it was deleted."""
        name = sweep["name"]
        found = self._client.get_experiment_by_name(name)
        if found is None:
            place = self._store.path / "mlartifacts" / name
            location = None if is_server(self.uri) else place.as_uri()
            tags = {
                "kvlab.sweep": name,
                "mlflow.note.content": truncate(sweep["question"], MAX_TAG_LENGTH),
            }
            return str(self._client.create_experiment(name, location, tags))
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        if found.tags.get("kvlab.sweep") != name:
            self._client.set_experiment_tag(found.experiment_id, "kvlab.sweep", name)
        return str(found.experiment_id)

    def _parent(
        self,
        experiment: str,
        sweep: Mapping[str, Any],
        found: Sequence["Run"],
        rows: Collection[RunDescription],
    ) -> "Run":
        if found:
            delete_runs(self._client, found[1:])
            return found[0]
        tags = {"kvlab.key": PARENT, "kvlab.store": self._identity, "kvlab.sweep": sweep["name"]}
        started = find_start_ms(self._store, sweep, rows)
        return self._client.create_run(experiment, started, tags, run_name=sweep["name"])

    def _described(
        self, sweep: Mapping[str, Any], only: str | None = None
    ) -> dict[str, RunDescription]:
        """Key -> run, of every cell and seed that has ended with a readable result."""
        found: dict[str, RunDescription] = {}
        for cell in sweep["cells"]:
            for trial in cell["trials"].values():
                if only is not None and trial != only:
                    continue
                try:
                    result = self._store.result(trial)
                except StoreError:  # damaged: it will be made again
                    continue
                if result is not None:
                    directory = self._store.trial_directory(trial)
                    run = describe_run(sweep, cell["levels"], result, directory)
                    found[run.key] = run
        return found

    def _directory(self, row: RunDescription) -> Path:
        return self._store.trial_directory(row.tags["kvlab.trial"])

    def _finish(
        self,
        parent: "Run",
        sweep: Mapping[str, Any],
        rows: Collection[RunDescription],
        report: str | Path | None,
    ) -> None:
        """The parent's record, report, tags and status, if any of them has changed."""
        run_id, known = parent.info.run_id, parent.data.tags
        self._keep_description(parent, sweep)
        if report is not None:
            digest = _hash_folder(Path(report))
            if known.get("kvlab.report.digest") != digest:
                self._client.log_artifacts(run_id, str(report), "report")
                self._client.set_tag(run_id, "kvlab.report.digest", digest)
        trials = {trial: self._store.status(trial) or "missing" for trial in _list_trials(sweep)}
        self._keep_damaged(parent, [t for t, state in trials.items() if state == "damaged"])
        states: Counter[str] = Counter(trials.values())
        for name, value in _parent_tags(sweep, states).items():
            if known.get(name) != value:
                self._client.set_tag(run_id, name, value)
        status = _parent_status(states, self._store.is_driven(sweep["name"]))
        ended = max((row.finished for row in rows), default=parent.info.start_time)
        if status == "RUNNING":
            if parent.info.status != status:
                self._client.update_run(run_id, status)
        elif (parent.info.status, parent.info.end_time) != (status, ended):
            self._client.set_terminated(run_id, status, ended)

    def _keep_description(self, parent: "Run", sweep: Mapping[str, Any]) -> None:
        """What the sweep is, as the record has it, so that reports can be made from here."""
        path = self._store.sweep_directory(sweep["name"]) / "sweep.json"
        digest = file_sha256(path)
        if parent.data.tags.get("kvlab.record.digest") != digest:
            self._client.log_artifact(parent.info.run_id, str(path), RECORD)
            self._client.set_tag(parent.info.run_id, "kvlab.record.digest", digest)

    def _keep_damaged(self, parent: "Run", trials: Sequence[str]) -> None:
        """Trials whose results cannot be read: reports from here shall say so too."""
        listed = json.dumps(trials)
        digest = hashlib.sha256(listed.encode()).hexdigest()
        if digest != parent.data.tags.get("kvlab.damaged.digest", _EMPTY_LIST_DIGEST):
            self._client.log_text(parent.info.run_id, listed, f"{RECORD}/{DAMAGED}")
            self._client.set_tag(parent.info.run_id, "kvlab.damaged.digest", digest)


_EMPTY_LIST_DIGEST = hashlib.sha256(b"[]").hexdigest()


def _parent_status(states: Mapping[str, int], driven: bool) -> str:
    if states.get("missing") or states.get("damaged"):
        return "RUNNING" if driven else "KILLED"
    return "FAILED" if states.get("failed") else "FINISHED"


def _parent_tags(sweep: Mapping[str, Any], states: Mapping[str, int]) -> dict[str, str]:
    listed = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    tags = {
        "kvlab.states": listed,
        "kvlab.seeds": json.dumps(sweep["seeds"]),
        "kvlab.baseline": json.dumps(sweep["baseline"]),
        "kvlab.yaml_sha256": str(sweep.get("yaml_sha256", "")),
        **{f"kvlab.levels.{f}": json.dumps(names) for f, names in sweep["factors"].items()},
        "mlflow.source.name": str(sweep.get("command", "")),
        "mlflow.source.type": "JOB",
        "mlflow.note.content": f"{sweep['question']}\n\n{listed}",
    }
    return {name: truncate(value, MAX_TAG_LENGTH) for name, value in tags.items() if value}


def _list_trials(sweep: Mapping[str, Any]) -> list[str]:
    """Trial ids of a sweep, each once."""
    return list(dict.fromkeys(t for cell in sweep["cells"] for t in cell["trials"].values()))


def _hash_folder(folder: Path) -> str:
    """Of every file's name and contents."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            contents = file_sha256(path)
            found.update(f"{path.relative_to(folder).as_posix()} {contents}\n".encode())
    return found.hexdigest()
