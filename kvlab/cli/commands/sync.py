"""`kvlab sync`: bring MLflow up to date with the record. Idempotent."""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from kvlab.cli.shared_arguments import ALL_SWEEPS, add_flag, add_record, sweep_name
from kvlab.cli.terminal import print_result, show_status_line
from kvlab.errors import UsageError
from kvlab.store import Store
from kvlab.track.connection import set_database_aside
from kvlab.track.tracker import MirrorSummary, Tracker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_record(parser, ALL_SWEEPS)
    text = "of MLflow (default: MLFLOW_TRACKING_URI, else mlflow.db in the store)"
    parser.add_argument("--tracking-uri", metavar="URI", help=text)
    add_flag(parser, "--no-report", "do not upload the report")
    add_flag(parser, "--rebuild", "first set the store's MLflow database aside, as it is damaged")


def run(options: argparse.Namespace) -> None:
    store = Store(options.store)
    if options.rebuild:
        if options.sweep is not None:
            raise UsageError("--rebuild makes the runs of all sweeps again; leave the sweep out")
        aside = set_database_aside(store.path, options.tracking_uri)
        print(f"the database of MLflow is in {aside} now", file=sys.stderr)
    names = store.sweep_names() if options.sweep is None else [sweep_name(options.sweep)]
    mirrored = sync_sweeps(store, names, options.tracking_uri, report=not options.no_report)
    lines = [
        f"{one.sweep}: {one.written} written, {one.unchanged} unchanged, {one.deleted} deleted"
        for one in mirrored
    ] or [f"{options.store} holds no sweep yet; nothing to do"]
    print_result(options, [asdict(one) for one in mirrored], "\n".join(lines))


def sync_sweeps(
    store: Store, names: list[str], uri: str | None, *, report: bool
) -> list[MirrorSummary]:
    """Mirror sweeps with their reports; a terminal shows how far it is."""
    from kvlab.report import write_report

    for name in names:
        store.sweep(name)  # refuse an unknown sweep before anything is written
    if not names:
        return []
    tracker, summaries = Tracker(store.path, uri), []
    show = show_status_line if sys.stderr.isatty() else lambda _line: None
    for name in names:
        show(f"{name}: reading the record")
        with tempfile.TemporaryDirectory() as folder:
            made = write_report(store, name, Path(folder)) if report else None
            summaries.append(tracker.mirror(name, made, show))
    show("")
    return summaries
