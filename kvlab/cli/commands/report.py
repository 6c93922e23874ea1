"""`kvlab report`: write the report of a sweep again, from its record or from MLflow."""

import argparse
import json
import tempfile
from pathlib import Path

from kvlab.cli.shared_arguments import add_json, add_store, sweep_name
from kvlab.errors import UsageError
from kvlab.report import write_report
from kvlab.report.sections import SECTIONS, explain_unknown_section
from kvlab.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="SWEEP", help="name or file of a submitted sweep")
    add_store(parser)
    parser.add_argument(
        "--out", default="reports", metavar="DIR", help="folder of reports (default: reports)"
    )
    parser.add_argument(
        "--sections",
        metavar="A,B",
        help="sections in order (default: those that the sweep names, else all)",
    )
    parser.add_argument(
        "--tracking-uri",
        metavar="URI",
        help="read the record from this MLflow instead of the store; the report is the same",
    )
    parser.add_argument(
        "--mirrored-by",
        metavar="ID",
        help="with --tracking-uri: id of the store, if several have mirrored a sweep of that name",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    name = sweep_name(options.sweep)
    folder = _write_report(options, name, _parse_sections(options.sections))
    if options.json:
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
        print(json.dumps({"sweep": name, "report": str(folder), "files": files}, indent=1))
    else:
        print(folder / "report.html")
        print(folder / "report.md")
    return 0


def _write_report(options: argparse.Namespace, name: str, sections: tuple[str, ...] | None) -> Path:
    """Write the report and return its folder."""
    if options.tracking_uri is None:
        if options.mirrored_by is not None:
            text = f"--mirrored-by = {options.mirrored_by} means nothing for a store"
            raise UsageError(f"{text}; add --tracking-uri, or leave it out")
        return write_report(Store(options.store), name, Path(options.out), sections)
    from kvlab.track import fetch_record

    with tempfile.TemporaryDirectory() as folder:
        uri, mirrored_by = options.tracking_uri, options.mirrored_by
        store = fetch_record(uri, name, Path(folder), mirrored_by)
        return write_report(store, name, Path(options.out), sections)


def _parse_sections(text: str | None) -> tuple[str, ...] | None:
    names = None if text is None else tuple(name.strip() for name in text.split(","))
    for name in names or ():
        if name not in SECTIONS:
            raise UsageError(f"--sections = {name} {explain_unknown_section(name)}")
        if names is not None and names.count(name) > 1:
            raise UsageError(f"--sections names {name} twice; name each once")
    return names
