"""`Tracker`: mirror sweeps of a store into MLflow. Used by drivers and `kvlab sync`."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
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
from kvlab.track import connection, sweep_summary
from kvlab.track import run_description as described
from kvlab.track.runs import ExperimentRuns, KnownRun

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
        self.uri = connection.tracking_uri(self._store.path, uri)
        self._client = connection.connect(self._store.path, self.uri)
        self._store_id = connection.read_store_id(self._store.path)

    def mirror(self, sweep_name: str, report: str | Path | None = None) -> MirrorSummary:
        """Bring a sweep's experiment up to date with the record.

        The experiment gets one parent run, with numbers and the answer of the sweep, and below it
        one run for every cell and seed that has ended. Runs that equal the record are not touched,
        so a second call changes nothing. Every other run of this store is deleted, and written
        again if the record has it.

        Args:
            report: folder of its report, logged with the parent run; None leaves the report of an
                unchanged sweep there.

        Raises:
            UsageError: the store has no such sweep.
            TrackingError: MLflow cannot be reached or refuses.
        """
        sweep = self._store.sweep(sweep_name)
        with self._open_runs(sweep_name) as mirrored:
            runs = mirrored.find()
            study = Study.load(self._store, sweep_name)
            own = self._describe_parent(sweep, study)
            folder = self._store.sweep_directory(sweep_name)
            parent, is_new = mirrored.write(own, folder, runs.pop(described.PARENT, []))
            written, unchanged = 0, 0
            for run in self._describe_runs(sweep):
                directory = self._store.trial_directory(run.tags["kvlab.trial"])
                existing = runs.pop(run.key, [])
                _, is_written = mirrored.write(run, directory, existing, parent.id)
                written += is_written
                unchanged += not is_written
            stale = [run for group in runs.values() for run in group]
            for one in stale:
                self._client.delete_run(one.id)
            tags = {
                "kvlab.sweep": sweep_name,
                **sweep_summary.experiment_tags(sweep, study.primary_metric),
            }
            if report is not None:
                states = own.tags["kvlab.states"]
                tags[NOTE] = self._log_report(parent, sweep, states, Path(report))
            elif is_new:
                tags[NOTE] = own.tags[NOTE]
            shown = self._client.get_experiment(mirrored.experiment).tags
            for name, value in tags.items():
                if shown.get(name) != value:
                    self._client.set_experiment_tag(mirrored.experiment, name, value)
        return MirrorSummary(sweep_name, mirrored.experiment, written, unchanged, len(stale))

    def log_models(self, sweep_name: str) -> int:
        """Log the weights of a mirrored sweep's trainings as logged models; return how many.

        Raises:
            TrackingError: MLflow cannot be reached or refuses.
        """
        self._store.sweep(sweep_name)  # raises if it is unknown
        with self._open_runs(sweep_name) as mirrored:
            runs = mirrored.find()
            if not runs.pop(described.PARENT, []):
                return 0
            return mirrored.log_models(
                self._store, [run for group in runs.values() for run in group]
            )

    def mirror_trial(self, sweep_name: str, trial_id: str) -> None:
        """Mirror one trial that has just ended, without looking at the others.

        Raises:
            UsageError: the store has no such sweep.
            TrackingError: MLflow cannot be reached or refuses.
        """
        sweep = self._store.sweep(sweep_name)
        with self._open_runs(sweep_name) as mirrored:
            parents = mirrored.find(key=described.PARENT).get(described.PARENT, [])
            if not parents:
                own = self._describe_parent(sweep, Study.load(self._store, sweep_name))
                folder = self._store.sweep_directory(sweep_name)
                parents = [mirrored.write(own, folder, [])[0]]
            directory = self._store.trial_directory(trial_id)
            for run in self._describe_runs(sweep, trial_id):
                known = mirrored.find(key=run.key).get(run.key, [])
                mirrored.write(run, directory, known, parents[0].id)

    def close_zombies(self) -> int:
        """Terminate this store's runs whose sweep no driver runs; return how many they were."""
        closed = 0
        with self._exclusive():
            for experiment in self._client.search_experiments():
                sweep = experiment.tags.get("kvlab.sweep")
                if sweep is None or self._store.is_driven(sweep):
                    continue
                mirrored = ExperimentRuns(self._client, experiment.experiment_id, self._store_id)
                running = mirrored.find(status="RUNNING")
                for run in (run for group in running.values() for run in group):
                    # A time from the record; `mirror` writes the run again if the result is there.
                    self._client.set_terminated(run.id, "KILLED", run.started)
                    closed += 1
        return closed

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the store's MLflow lock, with MLflow's errors translated."""
        with connection.hold_mlflow_lock(self._store.path), connection.translate_errors(self.uri):
            yield

    @contextmanager
    def _open_runs(self, sweep: str) -> Iterator[ExperimentRuns]:
        """Yield the runs of a sweep's experiment, which is created or restored if necessary."""
        with self._exclusive():
            experiment = self._client.get_experiment_by_name(sweep)
            if experiment is None:
                folder = self._store.path / "mlartifacts" / sweep
                location = None if connection.is_server(self.uri) else folder.as_uri()
                name = self._client.create_experiment(sweep, location, {"kvlab.sweep": sweep})
            else:
                name = experiment.experiment_id
                if experiment.lifecycle_stage == "deleted":
                    self._client.restore_experiment(name)
            yield ExperimentRuns(self._client, str(name), self._store_id)

    def _describe_parent(self, sweep: Mapping[str, Any], study: Study) -> described.RunDescription:
        """Return the sweep's own run, with all that a report needs beside the results."""
        name = sweep["name"]
        statuses = {t: self._store.status(t) or "missing" for t in self._store.sweep_trials(name)}
        states = Counter(statuses.values())
        summary = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        started = described.find_start_ms(self._store, sweep)
        ends = (
            described.to_milliseconds(r["provenance"]["finished"])
            for r in self._store.results(name)
        )
        finished = max(ends, default=started)
        status = "FAILED" if states.get("failed") else "FINISHED"
        if states.get("missing") or states.get("damaged"):
            status = "RUNNING" if self._store.is_driven(name) else "KILLED"
        directory = self._store.sweep_directory(name)
        texts = {"sweep.json": seal_json(sweep).decode()}
        tags = {described.RECORD_DIGEST: hashlib.sha256(texts["sweep.json"].encode()).hexdigest()}
        if read_timings(directory):  # there and intact
            texts[TIMINGS_FILE] = read_regular(directory / TIMINGS_FILE).decode()
            tags[described.TIMINGS_DIGEST] = hashlib.sha256(
                texts[TIMINGS_FILE].encode()
            ).hexdigest()
        if damaged := [trial for trial, state in statuses.items() if state == "damaged"]:
            texts[described.DAMAGED] = json.dumps(damaged)
        if (best := sweep_summary.find_best_cell(study)) is not None:
            tags["kvlab.best"] = described.cell_name(
                sweep, dict(zip(study.factors, best, strict=True))
            )
        tags |= {
            "kvlab.sweep": name,
            "kvlab.states": summary,
            "kvlab.seeds": json.dumps(sweep["seeds"]),
            "kvlab.baseline": json.dumps(sweep["baseline"]),
            "kvlab.yaml_sha256": str(sweep.get("yaml_sha256", "")),
            **{f"kvlab.levels.{f}": json.dumps(names) for f, names in sweep["factors"].items()},
            "mlflow.source.name": str(sweep.get("command", "")),
            "mlflow.source.type": "JOB",
            NOTE: sweep_summary.describe_sweep(sweep, summary, None),
        }
        return described.RunDescription(
            key=described.PARENT,
            name=name,
            status=status,
            started=started,
            finished=finished,
            params={},
            points=tuple(
                (key, x, finished, 0) for key, x in sweep_summary.measure_sweep(study).items()
            ),
            tags={
                key: described.truncate(text, described.MAX_TAG_LENGTH)
                for key, text in tags.items()
                if text
            },
            artifacts=(),
            dataset=None,
            texts={f"{described.RECORD}/{file}": text for file, text in texts.items()},
        )

    def _describe_runs(
        self, sweep: Mapping[str, Any], only: str | None = None
    ) -> Iterator[described.RunDescription]:
        """Iterate over the runs of every cell and seed with a readable result, each key once."""
        keys = set()
        timings = self._store.timings(sweep["name"])
        for cell in list_cells(sweep):
            for trial in cell["trials"].values():
                key = described.run_key(trial, cell["levels"])
                if key in keys or (only is not None and trial != only):
                    continue
                try:
                    result = self._store.result(trial, timings)
                except StoreError:  # damaged, so the trial will run again
                    continue
                if result is not None:
                    keys.add(key)
                    directory = self._store.trial_directory(trial)
                    yield described.describe_run(sweep, cell["levels"], result, directory)

    def _log_report(
        self, parent: KnownRun, sweep: Mapping[str, Any], states: str, report: Path
    ) -> str:
        """Log a report with the sweep's own run, if it is new there; return the answer in it."""
        digest = hashlib.sha256()
        for path in sorted(report.rglob("*")):
            if path.is_file():
                name = path.relative_to(report).as_posix()
                digest.update(f"{name} {file_sha256(path)}\n".encode())
        note = described.truncate(
            sweep_summary.describe_sweep(sweep, states, report), described.MAX_TAG_LENGTH
        )
        if parent.tags.get("kvlab.report.digest") != digest.hexdigest():
            self._client.log_artifacts(parent.id, str(report), "report")
            self._client.set_tag(parent.id, NOTE, note)
            self._client.set_tag(parent.id, "kvlab.report.digest", digest.hexdigest())
        return note
