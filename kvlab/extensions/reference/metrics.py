"""`kvlab metrics`: every measurement, its unit and how it is taken, as Markdown."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.cli.shared_arguments import add_flag
from kvlab.cli.terminal import print_result
from kvlab.errors import UsageError
from kvlab.humanize import suggest_name
from kvlab.store.metrics import FAMILY_TABLES, METRICS
from kvlab.track.run_description import DUPLICATES, tracked_name

HEAD = ["name", "what", "unit", "better", "in MLflow"]


@dataclass(frozen=True)
class MetricFamily:
    """Metrics that are taken together.

    Attributes:
        beginnings: of the names of its metrics; a whole name ends with a blank.
        key: of the experiment that asks for them; empty if they are always taken.
        method: how they are taken.
        sections: of the report that show them.
    """

    title: str
    beginnings: Sequence[str]
    key: str
    method: str
    sections: Sequence[str]

    def holds(self, name: str) -> bool:
        return f"{name} ".startswith(tuple(self.beginnings))


FAMILIES = tuple(MetricFamily(**one) for one in FAMILY_TABLES)

OTHER = MetricFamily("Other", (), "", "See their entries in the table of metrics.", ("effects",))


def find_family(name: str) -> MetricFamily:
    """Return the family of a metric; `OTHER` for one that is in none."""
    return next((family for family in FAMILIES if family.holds(name)), OTHER)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", help="metrics to describe (default: all)")
    add_flag(parser, "--json", "print facts as JSON")


def run(options: argparse.Namespace) -> None:
    for name in options.name:
        if name not in METRICS:
            hint = suggest_name(name, METRICS, "`kvlab metrics` lists them")
            raise UsageError(f"{name} is not a metric; {hint}")
    names = options.name or list(METRICS)
    print_result(options, list(map(describe_metric, names)), format_markdown(names))


def describe_metric(name: str) -> dict[str, Any]:
    """Return the facts of a metric as plain data."""
    metric, family = METRICS[name], find_family(name)
    return {
        "name": name,
        "title": metric.title,
        "unit": metric.unit or "share",
        "better": metric.better,
        "family": family.title,
        "method": family.method,
        "key": family.key,
        "derived": metric.derive is not None,
        "result_json": f"measurements.{name}" if metric.derive is None else None,
        "mlflow": _format_tracked(name),
        "sections": list(family.sections),
    }


def format_markdown(names: Sequence[str]) -> str:
    """Return the reference of metrics as Markdown."""
    is_complete, parts = len(names) == len(METRICS), []
    if is_complete:
        text = (
            f"{len(names)} measurements, and others that a sweep names, as their families say."
            " `result.json` has them by name under `measurements`; `results.csv` and"
            " `results.jsonl` of a report have a row for each trial. Names that end in `_served`"
            " are through the serving cache. A derived metric is computed when the record is read."
        )
        parts = ["# Measurements", text]
    for family in (*FAMILIES, OTHER):
        members = [name for name in names if find_family(name) is family]
        if not members and (family is OTHER or not is_complete):
            continue
        places = f"- Sections of the report: {', '.join(f'`{name}`' for name in family.sections)}"
        keys = ", ".join(f"`{key}`" for key in family.key.split(", ") if key)
        places = f"- Keys: {keys}\n{places}" if keys else places
        parts += [f"## {family.title}", family.method, places]
        if members:
            rows = [HEAD, ["---"] * len(HEAD)]
            for name in members:
                one = METRICS[name]
                title = one.title.replace("|", "\\|") + (" (derived)" if one.derive else "")
                unit = one.unit or "share"
                rows.append([f"`{name}`", title, unit, one.better, _format_tracked(name)])
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts)


def _format_tracked(name: str) -> str:
    if name in DUPLICATES:
        return f"none where equal to {_format_tracked(DUPLICATES[name])}"
    tracked, step = tracked_name(name)
    return tracked if step is None else f"{tracked}, step {step}"
