"""Find, write and delete the runs of a store in MLflow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.errors import TrackingError
from kvlab.track import run_description as described

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


PARAMS_PER_BATCH = 100
POINTS_PER_BATCH = 890
"""MLflow takes 1,000 entries per batch, of which 100 params."""


@dataclass(frozen=True)
class KnownRun:
    """What is needed of a run that exists. MLflow's own object takes tens of kilobytes.

    Attributes:
        id: MLflow's.
        ended: in ms since the epoch.
        shown: of its params and of the last values of its metrics; see `hash_shown`.
    """

    id: str
    status: str
    ended: int | None
    tags: Mapping[str, str]
    shown: str

    @classmethod
    def of(cls, run: "Run") -> "KnownRun":
        """Return what is needed of MLflow's object.

        Raises:
            TrackingError: the database is damaged: a value has another type.
        """
        info, data = run.info, run.data
        numbers = (info.start_time, info.end_time or 0, *data.metrics.values())
        pairs = chain(*data.tags.items(), *data.params.items())
        texts = (info.run_id, info.status, *data.metrics, *pairs)
        is_whole = all(isinstance(text, str) for text in texts)
        if not is_whole or not all(isinstance(number, int | float) for number in numbers):
            text = f"MLflow's run {info.run_id!a} has values of other types than were written"
            raise TrackingError(f"{text}: it is damaged; `kvlab sync --rebuild` makes it again")
        shown = described.hash_shown(data.params, data.metrics)
        return cls(info.run_id, info.status, info.end_time, data.tags, shown)


def iter_runs(client: "MlflowClient", experiment: str, condition: str) -> Iterator["Run"]:
    """Iterate over all runs of an experiment that fulfil an MLflow condition."""
    order = ["attributes.start_time ASC"]
    search = partial(client.search_runs, [experiment], condition, max_results=1000, order_by=order)
    page = search()
    yield from page
    while page.token:
        page = search(page_token=page.token)
        yield from page


@dataclass(frozen=True)
class ExperimentRuns:
    """The runs of a store in one experiment of MLflow.

    Attributes:
        experiment: MLflow's id.
        store_id: see `kvlab.track.connection.read_store_id`.
    """

    client: "MlflowClient"
    experiment: str
    store_id: str

    def find(self, key: str | None = None) -> dict[str, list[KnownRun]]:
        """Return runs by key. A kill may have left several of one key."""
        condition = f"tags.`kvlab.store` = '{self.store_id}'"
        if key is not None:
            condition += f" and tags.`kvlab.key` = '{key}'"
        runs: dict[str, list[KnownRun]] = {}
        for run in iter_runs(self.client, self.experiment, condition):
            runs.setdefault(run.data.tags.get("kvlab.key", ""), []).append(KnownRun.of(run))
        return runs

    def write(
        self,
        description: described.RunDescription,
        directory: Path,
        existing: Sequence[KnownRun],
        parent: str = "",
    ) -> tuple[KnownRun, bool]:
        """Make MLflow hold exactly one run as described; return it and whether it was written.

        A run that differs from its description is deleted and written again: its digest is another
        one or is missing, as the digest is written last, or it shows other params, values or times
        than were written, as where the database is damaged.

        Args:
            directory: of the trial, with the artifacts.
            existing: runs of this key.
            parent: MLflow's id of the sweep's own run; empty for that one.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

        client = self.client
        digest = description.digest(directory)
        shown = (digest, description.shown, description.status)
        kept: KnownRun | None = None
        for run in existing:
            is_same = (run.tags.get("kvlab.digest"), run.shown, run.status) == shown
            is_same = is_same and (run.ended == description.finished or not description.started)
            if is_same and kept is None:
                kept = run
            else:
                client.delete_run(run.id)
        if kept is not None:
            if parent and kept.tags.get("mlflow.parentRunId") != parent:
                client.set_tag(kept.id, "mlflow.parentRunId", parent)
            return kept, False
        tags = {**description.tags, "kvlab.key": description.key, "kvlab.store": self.store_id}
        if parent:
            tags["mlflow.parentRunId"] = parent
        start, name = description.started, description.name
        run = KnownRun.of(client.create_run(self.experiment, start, tags, run_name=name))
        for path, text in description.texts.items():
            client.log_text(run.id, text, path)
        for folder, path in description.artifacts:
            client.log_artifact(run.id, str(directory / path), folder or None)
        if description.dataset is not None:
            dataset = Dataset(source_type="kvlab", **description.dataset)
            context = InputTag("mlflow.data.context", "training")
            client.log_inputs(run.id, [DatasetInput(dataset, [context])])
        # Within a call MLflow stores tags last, so the digest is there if all of it is.
        params = [Param(name, value) for name, value in description.params.items()]
        points = [Metric(name, value, time, step) for name, value, time, step in description.points]
        batches = max(-(-len(params) // PARAMS_PER_BATCH), -(-len(points) // POINTS_PER_BATCH), 1)
        for number in range(batches):
            some_points = points[number * POINTS_PER_BATCH :][:POINTS_PER_BATCH]
            some_params = params[number * PARAMS_PER_BATCH :][:PARAMS_PER_BATCH]
            last = [RunTag("kvlab.digest", digest)] if number == batches - 1 else []
            client.log_batch(run.id, some_points, some_params, last)
        if description.finished is not None:
            client.set_terminated(run.id, description.status, description.finished)
        return run, True
