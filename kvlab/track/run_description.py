"""Describe the MLflow run of one cell at one seed: a pure function of the record.

Times come from the record, so a result gives the same points whenever it is mirrored, and MLflow
treats a point that is logged twice as one.

Metrics have the names of the record in groups. MLflow makes a section of charts for every group,
the part of a name before ``/``:

- ``quality/``: losses, accuracies and probes. ``_served`` marks scores through the serving cache.
- ``kv/``: bytes of the cache, and memory while decoding.
- ``speed/``: times of decoding.
- ``train/``: curves, size and throughput of the training.
- ``sweep/``: of a sweep's own run.

What the record holds of each eighth of the context, or of each turn, is a curve here.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlab.fs.atomic_files import file_sha256
from kvlab.humanize import sanitize_text
from kvlab.own_extensions import name_members
from kvlab.spec.sweep import SEARCH_FACTOR
from kvlab.store import DETAIL_FILES
from kvlab.store.metrics import collect_metrics
from kvlab.store.result import flatten

VERSION = 3
"""Raise it when the same record is mirrored differently: every run is then made anew."""

PARENT = "parent"
"""The key of a sweep's own run."""

RECORD = "record"
"""Artifact folder of the parent run with the sweep's description; see `kvlab.track.fetch`."""

DAMAGED = "damaged.json"
"""File in it that lists trials whose results could not be read."""

MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 5000
MAX_NAME_LENGTH = 200

MAX_CURVE_POINTS = 200
"""Of a curve in MLflow, whose tables would else hold millions of a large sweep. `result.json`, an
artifact of the run, has all of them."""

HASH_DIGITS = 16

MetricPoint = tuple[str, float, int, int]
"""Name, value, time in ms, step."""


@dataclass(frozen=True)
class RunDescription:
    """One MLflow run.

    Attributes:
        key: names it within the sweep.
        name: for people.
        status: MLflow's.
        started, finished: in ms since the epoch; None while it runs.
        params, points, tags: as MLflow takes them.
        artifacts: pairs of folder inside the run and path relative to the trial's directory.
        dataset: name, digest, source and profile; None if the trial failed before it was known.
        texts: further artifacts by their paths inside the run.
    """

    key: str
    name: str
    status: str
    started: int
    finished: int | None
    params: Mapping[str, str]
    points: tuple[MetricPoint, ...]
    tags: Mapping[str, str]
    artifacts: tuple[tuple[str, str], ...]
    dataset: Mapping[str, str] | None
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The run's `hash_shown`; the last point of a metric is that of the highest step."""
        points = sorted(self.points, key=lambda point: (point[3], point[2], point[1]))
        return hash_shown(self.params, {name: value for name, value, _, _ in points})

    def digest(self, directory: Path) -> str:
        """Return the sha256 of the description and of the contents of its artifacts."""
        contents = [file_sha256(directory / path) for _, path in self.artifacts]
        text = json.dumps([VERSION, vars(self), contents], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def hash_shown(params: Mapping[str, str], metrics: Mapping[str, float]) -> str:
    """Return the sha256 of the params of a run and of the last values of its metrics."""
    values = sorted((name, float(value)) for name, value in metrics.items())
    text = json.dumps([sorted(params.items()), values])
    return hashlib.sha256(text.encode()).hexdigest()


def describe_run(
    sweep: Mapping[str, Any], levels: Mapping[str, str], result: Mapping[str, Any], directory: Path
) -> RunDescription:
    """Return the run of one result.

    Args:
        sweep: contents of `sweep.json`.
        levels: of the trial's cell, by factor.
        result: contents of `result.json`.
        directory: of the trial.
    """
    provenance = result["provenance"]
    started, finished = (to_milliseconds(provenance[end]) for end in ("started", "finished"))
    params = {
        name if "." in name else f"experiment.{name}": value
        for name, value in flatten_settings(result["experiment"])
    }
    params |= {factor_param(factor): level for factor, level in levels.items()}
    params["seed"] = str(result["seed"])
    artifacts = [("", name) for name in ("result.json", *DETAIL_FILES)]
    if attempts := provenance.get("attempts"):
        folder = f"attempts/{attempts}"
        artifacts += [(folder, f"{folder}/{name}") for name in ("log.txt", "traceback.txt")]
    key = json.dumps([result["trial"], sorted(levels.items())])  # a trial may be of several cells
    return RunDescription(
        key=hashlib.sha256(key.encode()).hexdigest()[:HASH_DIGITS],
        name=f"{cell_name(sweep, levels)} seed {result['seed']}",
        status={"done": "FINISHED", "pruned": "KILLED"}.get(result["status"], "FAILED"),
        started=started,
        finished=finished,
        params={name: truncate(value, MAX_PARAM_LENGTH) for name, value in params.items()},
        points=tuple(_metric_points(result, started, finished)),
        tags=_tags(sweep, levels, result),
        artifacts=tuple(one for one in artifacts if (directory / one[1]).exists()),
        dataset=_dataset(result),
    )


def cell_name(sweep: Mapping[str, Any], levels: Mapping[str, str]) -> str:
    """Return the levels that differ from the baseline; of a search, the settings of the point.

    A level that several factors have is written with its factor, as reports do.
    """
    changed = {f: level for f, level in levels.items() if level != sweep["baseline"].get(f)}
    if tuple(sweep["factors"]) == (SEARCH_FACTOR,) and SEARCH_FACTOR in changed:
        patch = (sweep.get("patches") or {}).get(SEARCH_FACTOR, {}).get(changed[SEARCH_FACTOR], {})
        settings = [f"{key.rpartition('.')[2]}={value}" for key, value in flatten_settings(patch)]
        return truncate(" ".join(settings) or changed[SEARCH_FACTOR], MAX_NAME_LENGTH)
    counts = Counter(level for names in sweep["factors"].values() for level in set(names))
    names = [f"{f}={level}" if counts[level] > 1 else level for f, level in changed.items()]
    return truncate("+".join(names) or "baseline", MAX_NAME_LENGTH)


def factor_param(factor: str) -> str:
    """Return the name of the param that holds a factor's level."""
    return f"factor.{factor}" if factor == "seed" else factor


def flatten_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Iterate over nested settings as dotted names and texts; lists are written as JSON."""
    for name, value in flatten(settings):
        yield name, value if isinstance(value, str) else json.dumps(value)


def truncate(text: str, longest: int) -> str:
    """Return ``text`` as MLflow can store it.

    It is made printable as in reports, since a database refuses surrogates. If it has more than
    ``longest`` characters, the end is replaced by a hash of the whole.
    """
    text = sanitize_text(text)
    if len(text) <= longest:
        return text
    end = f"... sha256:{hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]}"
    return text[: longest - len(end)] + end


def to_milliseconds(moment: str) -> int:
    """Return an ISO 8601 time in ms since the epoch."""
    parsed = datetime.fromisoformat(moment)
    return round(parsed.replace(tzinfo=parsed.tzinfo or UTC).timestamp() * 1000)


def _metric_points(result: Mapping[str, Any], started: int, finished: int) -> Iterator[MetricPoint]:
    """Iterate over the points of curves, one per step, and of metrics, at the last step.

    Values that are not finite are left out: MLflow stores them as 0 and a mark.
    """
    last = int((result.get("training_record") or {}).get("steps") or 0)
    for name, curve in sorted((result.get("curves") or {}).items()):
        losses = {int(step): float(loss) for step, _, loss in curve if math.isfinite(loss)}
        points = sorted(losses.items())
        if len(points) > MAX_CURVE_POINTS:  # evenly spaced, with the first and the last
            most = MAX_CURVE_POINTS - 1
            points = [points[n * (len(points) - 1) // most] for n in range(most + 1)]
        for step, loss in points:
            share = min(1.0, step / last) if last else 1.0
            yield tracked_name(name)[0], loss, round(started + share * (finished - started)), step
    for name, value, point in tracked_metrics(result):
        yield name, value, finished, last if point is None else point


def _tags(
    sweep: Mapping[str, Any], levels: Mapping[str, str], result: Mapping[str, Any]
) -> dict[str, str]:
    provenance, error = result["provenance"], result.get("error") or {}
    data = provenance.get("data") or {}
    tags = {
        "kvlab.sweep": sweep["name"],
        "kvlab.cell": cell_name(sweep, levels),
        **{f"kvlab.{key}": result[key] for key in ("trial", "training", "seed", "status")},
        **{f"kvlab.{k}": provenance.get(k) for k in ("commit", "dirty", "device", "attempts")},
        **{f"kvlab.error.{key}": error.get(key) for key in ("class", "type", "message")},
        "kvlab.timed_again": (result.get("timing") or {}).get("finished"),
        "kvlab.data.digest": data.get("digest"),
        "mlflow.source.git.commit": provenance.get("commit"),
        "mlflow.source.name": provenance.get("command"),
        "mlflow.source.type": "JOB",
    }
    return format_tags(tags)


def format_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    """Return tags as MLflow can store them, without those that have no value."""
    return {
        name: truncate(value if isinstance(value, str) else json.dumps(value), MAX_TAG_LENGTH)
        for name, value in tags.items()
        if value not in (None, "")
    }


def _dataset(result: Mapping[str, Any]) -> dict[str, str] | None:
    """Return name, digest, source and profile of the training text, with its licence."""
    data, settings = result["provenance"].get("data"), result["experiment"]["data"]
    if not data:
        return None
    origin = {
        "source": settings["source"],
        **{key: settings[key] for key in ("subset", "paths") if settings.get(key)},
        **{key: data[key] for key in ("licence", "tokenizer") if data.get(key)},
    }
    return {
        "name": sanitize_text(str(settings["source"])),
        "digest": str(data["digest"])[:36],  # MLflow keeps 36 characters
        "source": truncate(json.dumps(origin), MAX_PARAM_LENGTH),
        "profile": truncate(json.dumps(data), MAX_PARAM_LENGTH),
    }


# Names of metrics


RENAMED = {
    "kv_bytes_storage": "kv/bytes",
    "kv_bytes_read": "kv/bytes_read_per_token",
    "training_tokens_per_second": "train/tokens_per_second",
    "training_flops_per_second": "train/flops_per_second",
    "training_mfu": "train/mfu",
    "training_peak_bytes": "train/peak_bytes",
    "training_compile_seconds": "train/compile_seconds",
    "train_loss": "train/loss",
    "validation_loss": "train/validation_loss",
}
"""Metrics and curves of the record whose names are shorter in MLflow."""

DUPLICATES = {
    "kv_bytes_formula": "kv_bytes_storage",
    "loss_paired": "loss",
    "bits_per_byte_paired": "bits_per_byte",
}
"""Metric of the record -> the one that makes it superfluous where both have the same value."""

_GROUPS: dict[str, str | tuple[str, ...]] = {
    "kv": ("peak_bytes_",),
    "speed": ("ttft_", "tpot_", "tokens_per_second", "cache_speedup"),
    **name_members("tracked_groups"),
}
"""Group -> beginnings of names; all other names are in ``quality``."""

_POINT = re.compile(
    r"(?P<name>\w+?)_(?:part(?P<part>[1-8])|turn(?P<turn>[0-9]+))(?P<served>_served)?"
)

SIZES = {
    "kv/bytes": ("kv", "bytes_at_block_size"),
    "kv/bytes_per_token": ("kv", "bytes_per_token"),
    "train/parameters": ("model", "parameters"),
    "train/flops": ("model", "training_flops"),
}
"""Metric in MLflow -> where `result.json` has it, of a trial that failed, too."""


def tracked_name(name: str) -> tuple[str, int | None]:
    """Return a metric's name in MLflow, and its step if it is a point of a curve.

    Args:
        name: a metric or curve of the record.
    """
    step = None
    if match := _POINT.fullmatch(name):
        step = int(match["part"] or match["turn"])
        axis = "context" if match["part"] else "turn"
        name = f"{match['name']}_by_{axis}{match['served'] or ''}"
    if name in RENAMED:
        return RENAMED[name], None
    for group, beginnings in _GROUPS.items():
        if name.startswith(beginnings):
            return f"{group}/{name.removeprefix(f'{group}_')}", step
    return f"quality/{name}", step


def tracked_metrics(result: Mapping[str, Any]) -> Iterator[tuple[str, float, int | None]]:
    """Iterate over a result's metrics as MLflow gets them: name, value and step, if it has one.

    Duplicates and values that are not finite are left out: MLflow's page would draw NaN as 0.

    Args:
        result: contents of `result.json`.
    """
    metrics = collect_metrics(result)
    values: dict[tuple[str, int | None], Any] = {
        (name, None): result[section][key] for name, (section, key) in SIZES.items()
    }
    for name, value in metrics.items():
        if name not in DUPLICATES or value != metrics.get(DUPLICATES[name]):
            values[tracked_name(name)] = value
    for name, step in sorted(values, key=lambda key: (key[0], key[1] or 0)):
        if math.isfinite(value := values[name, step]):
            yield name, float(value), step
