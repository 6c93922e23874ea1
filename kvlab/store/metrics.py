"""The table of metrics: every number that a trial can measure, by its name in the record.

`metrics.toml` has their titles, units and directions, and the families for the reference. That of
an extension has its own, and the metric and family that they come after. Some have names by a
rule, see `MetricTable`. A measured metric is added by a line there and a measurement of that name
in a trial. A derived one is added by a line and a function of the other measurements in its table
``derived``, and applies to all trials that were recorded before.
"""

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from kvlab.errors import UsageError
from kvlab.humanize import suggest_name
from kvlab.layout import KVLayout
from kvlab.own_extensions import find_files, import_late, insert_after
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.spec.token_metrics import read_metric_texts

Direction = Literal["lower", "higher", "neither"]


@dataclass(frozen=True)
class Metric:
    """One number that describes a trial.

    Attributes:
        title: for headings and tables.
        unit: printed after the number; empty for a share.
        better: which direction is an improvement.
        derive: of a metric that is not recorded: computes it from those that are. Returns None
            where it does not apply.
        rounding: a recorded value below it is rounding, and read as zero.
        items: of a share, the metric that counts its items, where differences are to be no surer
            than so many items allow.
    """

    title: str
    unit: str
    better: Direction = "neither"
    derive: Callable[[Mapping[str, float]], float | None] | None = None
    rounding: float = 0.0
    items: str | None = None

    @property
    def is_share(self) -> bool:
        """Whether it is a share of items: with few items, two seeds agree by chance."""
        return not self.unit

    def write_margin(self, margin: float | None) -> str:
        """Return a margin as reports print it: of a share in points."""
        return f"{100 * margin:g} points" if self.items and margin else f"{margin or 0.0:g}"


def derive_ratio(over: str, under: str, measurements: Mapping[str, float]) -> float | None:
    """Return one measurement over another one."""
    a, b = measurements.get(over), measurements.get(under)
    return a / b if a and b else None


def derive_paired_loss(measurements: Mapping[str, float]) -> float | None:
    """Return the one-shot loss of the tokens that were scored served, in nats per token."""
    served, gap = measurements.get("loss_served"), measurements.get("serving_gap")
    if served is None or gap is None:
        return None
    if measurements.get("loss_tokens") == measurements.get("served_tokens"):
        return measurements.get("loss")
    return served - gap


def derive_paired_bits(measurements: Mapping[str, float]) -> float | None:
    """Return the one-shot bits per byte of the text that was scored served."""
    loss, served = derive_paired_loss(measurements), measurements.get("loss_served")
    bits = measurements.get("bits_per_byte_served")
    if loss is None or not served or bits is None:
        return None
    if measurements.get("loss_tokens") == measurements.get("served_tokens"):
        return measurements.get("bits_per_byte")
    return bits * loss / served  # the same tokens, so the same bytes


def _split_numbers(name: str) -> list[str | int]:
    """Return a name such that 16 sorts after 8."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


class MetricTable(dict[str, Metric]):
    """Metrics by name; iteration yields those with an entry.

    Names that match one of the ``rules`` are metrics without an entry: which of them there are is
    known from a sweep alone, as of ``recall_<n>_pairs``.
    """

    def __missing__(self, name: str) -> Metric:
        for pattern, describe in _RULES.items():
            if match := pattern.fullmatch(name):
                return describe(match)
        raise UsageError(f"{name!r} is no metric; {suggest_name(name, self, 'see kvlab metrics')}")

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            isinstance(name, str) and any(pattern.fullmatch(name) for pattern in _RULES)
        )

    def offer(self, texts: Iterable[str]) -> None:
        """Add the metrics that users' files describe. The files are not run.

        Of two files with one name the last one that is read describes it.
        """
        for text in texts:
            for one in _describe_metrics(text):
                for name, title in ((one.name, ""), (f"{one.name}_served", ", served")):
                    if not self._is_own(name):
                        self[name] = Metric(one.title + title, one.unit, one.better)

    def is_offered(self, name: str) -> bool:
        """Whether a metric is of a user's file."""
        return super().__contains__(name) and name not in _OWN

    def _is_own(self, name: str) -> bool:
        return name in _OWN or any(pattern.fullmatch(name) for pattern in _RULES)

    def find_taken(self, texts: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Yield the names of metrics of users' files that kvlab has given to its own, and lines."""
        for one in (one for text in texts for one in _describe_metrics(text)):
            names = one.name, f"{one.name}_served"
            yield from ((name, one.line) for name in names if self._is_own(name))

    def sort(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of ``names`` that are metrics, in the order of the table."""
        given = set(names)
        by_rule = sorted(
            (name for name in given - set(self) if name in self),
            key=lambda name: (_split_numbers(name.removesuffix("_served")), name),
        )
        return (*(name for name in self if name in given), *by_rule)


def _read_tables() -> dict[str, Any]:
    """Return `metrics.toml` with what is in those of extensions, at its place."""
    tables = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
    for path in find_files("metrics.toml"):
        added = tomllib.loads(path.read_text(encoding="utf-8"))
        after, own = added["after"], tables["metrics"]
        tables["metrics"] = insert_after(own, after["metric"], added["metrics"])
        old, new = (
            {family["title"]: family for family in one.get("families", [])}
            for one in (tables, added)
        )
        tables["families"] = list(insert_after(old, after["family"], new).values())
        for table in ("derived", "rules", "short_titles"):
            tables[table] |= added.get(table, {})
        for kind, names in added.get("beginnings", {}).items():
            tables["beginnings"][kind] += names
    return tables


def _make_metric(
    title: str, unit: str, better: Direction, derive: Sequence[str] | None, **more: Any
) -> Metric:
    function = None
    if derive is not None:
        place, *arguments = derive
        function = partial(import_late(place), *arguments)
    return Metric(title, unit, better, function, **more)


_TABLES = _read_tables()

METRICS = MetricTable(
    {
        name: _make_metric(title, unit, better, _TABLES["derived"].get(name), **dict(*more))
        for name, (title, unit, better, *more) in _TABLES["metrics"].items()
    }
)
_OWN = frozenset(METRICS)
_describe_metrics = lru_cache(maxsize=256)(lambda text: tuple(read_metric_texts(text)))

_RULES: dict[re.Pattern[str], Callable[[re.Match[str]], Metric]] = {
    re.compile(pattern): import_late(place) for pattern, place in _TABLES["rules"].items()
}
"""Names of metrics that have no entry, and what describes them."""

SHORT_TITLES: dict[str, str] = _TABLES["short_titles"]

BEGINNINGS: dict[str, tuple[str, ...]] = {k: tuple(v) for k, v in _TABLES["beginnings"].items()}
"""Kind of metrics -> how their names begin."""


FAMILY_TABLES: list[dict[str, Any]] = _TABLES["families"]
"""The families of metrics, for the reference, in its order."""


def collect_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Return a result's metrics by name, the recorded and the derived ones.

    What is below a metric's rounding is zero here, so that no comparison takes it for an effect.

    Args:
        result: contents of `result.json`.
    """
    METRICS.offer((result.get("experiment") or {}).get("extensions", {}).values())
    metrics: dict[str, float] = {
        name: 0.0 if name in METRICS and abs(value) < METRICS[name].rounding else value
        for name, value in (result.get("measurements") or {}).items()
    }
    if "kv_bytes_read" in metrics and (read := _count_read_bytes(result)) is not None:
        metrics["kv_bytes_read"] = read
    for name, metric in METRICS.items():
        value = metric.derive(metrics) if metric.derive and name not in metrics else None
        if value is not None and math.isfinite(value):
            metrics[name] = value
    return metrics


def _count_read_bytes(result: Mapping[str, Any]) -> int | None:
    """Return the K/V bytes that a decoded token reads, by the layout as it is now.

    Nothing measures them, and their formula was corrected after some results were recorded. None,
    so that they stay as recorded, if the experiment has a user's code, which a reader of a record
    does not run, or needs an extension that is not there.
    """
    experiment = result.get("experiment") or {}
    lines = result.get("benchmark") or ()
    line = next((line for line in lines if line["metric"] == "kv_read"), None)
    if line is None or experiment.get("extensions"):
        return None
    try:  # a record may have settings of an earlier version, at what was their default
        model = ModelConfig.model_validate(experiment["model"], extra="ignore")
        serving = ServingConfig.model_validate(experiment["serving"], extra="ignore")
    except ValidationError:
        return None
    place = line["batch_size"], line["context_length"], line["dtype"]
    return KVLayout.of(model, serving).read_bytes(*place)
