"""`kvlab metrics`: every measurement, its unit, how it is taken and where it appears."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from kvlab.cli.terminal import format_table
from kvlab.errors import UsageError
from kvlab.store.metrics import FAMILIES, METRICS, OTHER, MetricFamily, find_family
from kvlab.track.run_description import DUPLICATES, tracked_name

HEAD = ("name", "what", "unit", "better", "in MLflow")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", help="metrics to describe (default: all)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print Markdown, as on the site")
    form.add_argument("--json", action="store_true", help="print facts as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the reference of metrics.

    Raises:
        UsageError: a name is no metric.
    """
    for name in options.name:
        _check_name(name)
    names = options.name or list(METRICS)
    if options.json:
        print(json.dumps([describe_metric(name) for name in names], indent=1))
        return 0
    if options.markdown:
        print(format_markdown(names))
        return 0
    for family, members in _group_by_family(names):
        print(_format_text(family, members))
    return 0


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
    text = (
        f"{len(names)} measurements, and those of lm-eval. `result.json` has them by name under"
        " `measurements`; `results.csv` and `results.jsonl` of a report have a row for each trial."
        " Names that end in `_served` are through the serving cache. A derived metric is computed"
        " when the record is read."
    )
    parts = ["# Measurements", text]
    for family, members in _group_by_family(names):
        parts += [f"## {family.title}", family.method, "\n".join(_list_places(family, "`"))]
        if members:
            lines = [_format_row(HEAD), _format_row(["---"] * len(HEAD))]
            lines += [_format_row(_quote_names(_make_row(name))) for name in members]
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _group_by_family(names: Sequence[str]) -> Iterator[tuple[MetricFamily, list[str]]]:
    """Yield the families of metrics, with those that are in ``names``; all if these are all."""
    is_complete = len(names) == len(METRICS)
    for family in (*FAMILIES, OTHER):
        members = [name for name in names if find_family(name) is family]
        if members or (is_complete and family is not OTHER):
            yield family, members


def _check_name(name: str) -> None:
    if name not in METRICS:
        near = get_close_matches(name, METRICS, 1)
        hint = f"did you mean {near[0]}?" if near else "`kvlab metrics` lists them"
        raise UsageError(f"{name} is not a metric; {hint}")


def _format_text(family: MetricFamily, names: list[str]) -> str:
    method = textwrap.wrap(family.method, 98)
    lines = [family.title, *method, *_list_places(family, "")]
    if names:
        lines += ["", format_table([HEAD, *map(_make_row, names)])]
    return "\n".join([lines[0], *(f"  {line}" if line else "" for line in _split(lines[1:])), ""])


def _split(lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield from line.split("\n") if line else [""]


def _list_places(family: MetricFamily, quote: str) -> Iterator[str]:
    keys = [f"{quote}{key}{quote}" for key in family.key.split(", ") if key]
    if keys:
        yield f"- Keys: {', '.join(keys)}"
    names = (f"{quote}{name}{quote}" for name in family.sections)
    yield f"- Sections of the report: {', '.join(names)}"


def _make_row(name: str) -> tuple[str, ...]:
    metric = METRICS[name]
    title = f"{metric.title} (derived)" if metric.derive else metric.title
    return name, title, metric.unit or "share", metric.better, _format_tracked(name)


def _format_tracked(name: str) -> str:
    if name in DUPLICATES:
        return f"none where equal to {_format_tracked(DUPLICATES[name])}"
    tracked, step = tracked_name(name)
    return tracked if step is None else f"{tracked}, step {step}"


def _quote_names(row: tuple[str, ...]) -> tuple[str, ...]:
    name, title, *facts = row
    return f"`{name}`", title.replace("|", "\\|"), *facts


def _format_row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"
