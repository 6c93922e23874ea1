"""`Tracker`: mirror sweeps of a store into MLflow. Used by drivers and `kvlab sync`."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
    """

    sweep: str
    experiment: str
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
        self.uri = connection.tracking_uri(self._store.path, uri)
        self._client = connection.connect(self._store.path, self.uri)
        self._store_id = connection.read_store_id(self._store.path)

    def mirror(
        self,
        sweep_name: str,
        report: Path | None = None,
        show: Callable[[str], object] = lambda _line: None,
    ) -> MirrorSummary:
        """Bring a sweep's experiment up to date with the record.

        The experiment gets one parent run, with numbers and the answer of the sweep, and below it
        one run for every cell and seed that has ended. Runs that equal the record are not touched,
        so a second call changes nothing. Every other run of this store is deleted, and written
        again if the record has it.

        Args:
            report: folder of its report, logged with the parent run; None leaves the report of an
                unchanged sweep there.
            show: receives lines for the person who waits.

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
            is_written: list[bool] = []
            total = sum(len(cell["trials"]) for cell in list_cells(sweep))
            for run in self._describe_runs(sweep):
                show(f"{sweep_name}: run {len(is_written) + 1} of {total}")
                directory = self._store.trial_directory(run.tags["kvlab.trial"])
                existing = runs.pop(run.key, [])
                is_written.append(mirrored.write(run, directory, existing, parent.id)[1])
            stale = [run for group in runs.values() for run in group]
            for one in stale:
                self._client.delete_run(one.id)
            tags = sweep_summary.experiment_tags(sweep, study.primary_metric)
            if report is not None:
                tags[NOTE] = self._log_report(parent, sweep, own.tags["kvlab.states"], report)
            elif is_new:
                tags[NOTE] = own.tags[NOTE]
            shown = self._client.get_experiment(mirrored.experiment).tags
            for name, value in tags.items() - shown.items():
                self._client.set_experiment_tag(mirrored.experiment, name, value)
        written = sum(is_written)
        unchanged = len(is_written) - written
        return MirrorSummary(sweep_name, mirrored.experiment, written, unchanged, len(stale))

    def mirror_trial(self, sweep_name: str, trial_id: str) -> None:
        """Mirror one trial that has just ended, without looking at the others.

        Raises:
            UsageError: the store has no such sweep.
            TrackingError: MLflow cannot be reached or refuses.
        """
        sweep = self._store.sweep(sweep_name)
        with self._open_runs(sweep_name) as mirrored:
            parents = mirrored.find(described.PARENT).get(described.PARENT, [])
            directory = self._store.trial_directory(trial_id)
            for run in self._describe_runs(sweep, trial_id) if parents else ():
                known = mirrored.find(run.key).get(run.key, [])
                mirrored.write(run, directory, known, parents[0].id)
        if not parents:
            self.mirror(sweep_name)

    @contextmanager
    def _open_runs(self, sweep: str) -> Iterator[ExperimentRuns]:
        """Yield the runs of a sweep's experiment, which is created or restored if necessary."""
        with connection.hold_mlflow_lock(self._store.path), connection.translate_errors(self.uri):
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
        ends = [one["provenance"] for one in self._store.results(name)]
        started = min((described.to_milliseconds(one["started"]) for one in ends), default=0)
        finished = max((described.to_milliseconds(one["finished"]) for one in ends), default=0)
        status = "FAILED" if states.get("failed") else "FINISHED"
        if states.get("missing") or states.get("damaged"):
            status = "RUNNING" if self._store.is_driven(name) else "KILLED"
        texts = {"sweep.json": seal_json(sweep).decode()}
        directory = self._store.sweep_directory(name)
        if read_timings(directory):  # there and intact
            texts[TIMINGS_FILE] = read_regular(directory / TIMINGS_FILE).decode()
        if damaged := [trial for trial, state in statuses.items() if state == "damaged"]:
            texts[described.DAMAGED] = json.dumps(damaged)
        tags = {
            "kvlab.sweep": name,
            "kvlab.states": summary,
            "kvlab.seeds": sweep["seeds"],
            "kvlab.baseline": sweep["baseline"],
            "kvlab.yaml_sha256": sweep.get("yaml_sha256"),
            **{f"kvlab.levels.{factor}": names for factor, names in sweep["factors"].items()},
            "mlflow.source.name": sweep.get("command"),
            "mlflow.source.type": "JOB",
            NOTE: sweep_summary.describe_sweep(sweep, summary, None),
        }
        if (best := sweep_summary.find_best_cell(study)) is not None:
            levels = dict(zip(study.factors, best, strict=True))
            tags["kvlab.best"] = described.cell_name(sweep, levels)
        metrics = sweep_summary.measure_sweep(study).items()
        return described.RunDescription(
            key=described.PARENT,
            name=name,
            status=status,
            started=started,
            finished=None if status == "RUNNING" else finished,
            params={},
            points=tuple((key, value, finished, 0) for key, value in metrics),
            tags=described.format_tags(tags),
            artifacts=(),
            dataset=None,
            texts={f"{described.RECORD}/{file}": text for file, text in texts.items()},
        )

    def _describe_runs(
        self, sweep: Mapping[str, Any], only: str | None = None
    ) -> Iterator[described.RunDescription]:
        """Iterate over the runs of every cell and seed with a readable result."""
        timings = self._store.timings(sweep["name"])
        for cell in list_cells(sweep):
            for trial in cell["trials"].values():
                if only not in (None, trial):
                    continue
                try:
                    result = self._store.result(trial, timings)
                except StoreError:  # damaged, so the trial will run again
                    continue
                if result is not None:
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
        text = sweep_summary.describe_sweep(sweep, states, report)
        note = described.truncate(text, described.MAX_TAG_LENGTH)
        if parent.tags.get("kvlab.report.digest") != digest.hexdigest():
            self._client.log_artifacts(parent.id, str(report), "report")
            self._client.set_tag(parent.id, NOTE, note)
            self._client.set_tag(parent.id, "kvlab.report.digest", digest.hexdigest())
        return note
