"""`kvlab report`: write the report of a sweep again, from its record or from MLflow."""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from kvlab.analysis.study import Study
from kvlab.cli import shared_arguments as shared
from kvlab.cli.terminal import print_answer, print_result
from kvlab.errors import UsageError
from kvlab.own_extensions import find_member
from kvlab.report import answer_text, write_study_report
from kvlab.report.sections import (
    SEARCH_SECTIONS,
    SECTIONS,
    choose_sections,
    explain_unknown_section,
)
from kvlab.store.verification import check_record

WATCH_SECONDS = 2.0
"""Pause between two looks at the record."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_record(parser, "name or file of a submitted sweep", archive=True)
    shared.add_reports(parser)
    text = "sections in order (default: those that the sweep names, else all)"
    parser.add_argument("--sections", metavar="A,B", help=text)
    text = "of a search: write no report, but a sweep that repeats the best trials on new seeds"
    parser.add_argument("--confirm", metavar="FILE", help=text)
    text = "read the record from this MLflow instead of the store; the report is the same"
    parser.add_argument("--tracking-uri", metavar="URI", help=text)
    text = "with --tracking-uri: id of the store, if several have mirrored a sweep of that name"
    parser.add_argument("--mirrored-by", metavar="ID", help=text)
    shared.add_flag(parser, "--watch", "write it again after every trial until no driver runs")
    shared.add_flag(parser, "--strict", "write no report if a file of the record is damaged")


def run(options: argparse.Namespace) -> None:
    name, text = shared.sweep_name(options.sweep), options.sections
    sections = None if text is None else tuple(one.strip() for one in text.split(","))
    for one in sections or ():
        if one not in SECTIONS and one not in SEARCH_SECTIONS:
            raise UsageError(f"--sections = {one} {explain_unknown_section(one)}")
        if sections is not None and sections.count(one) > 1:
            raise UsageError(f"--sections names {one} twice; name each once")
    if options.confirm is not None:
        for other in ("sections", "watch", "tracking_uri"):
            if getattr(options, other):
                flag = f"--{other.replace('_', '-')}"
                text = f"--confirm writes a sweep and no report, so {flag} has no effect"
                raise UsageError(f"{text}; leave one of them out")
        study = Study.load(shared.open_store(options.store), name)
        choose_sections(is_search=True)  # which needs the extension of searches
        find_member("search", "confirmation")(study, Path(options.confirm))
        facts = {"sweep": name, "confirmation": options.confirm}
        print_result(options, facts, f"{options.confirm}\nnext: kvlab plan {options.confirm}")
        return
    if options.watch:
        _watch(options, name, sections)
        return
    folder, answer = _write_report(options, name, sections)
    if options.json:
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
        facts = {"sweep": name, "report": str(folder), "answer": answer, "files": files}
        print(json.dumps(facts, indent=1))
        return
    print_answer(answer, folder, sys.stdout)
    print(folder / "report.md")


def _watch(options: argparse.Namespace, name: str, sections: tuple[str, ...] | None) -> None:
    """Write the report whenever a trial has ended, until no driver runs the sweep any more.

    A report takes at most half of a core: the pause after it is as long as it took.
    """
    if options.tracking_uri is not None:
        text = "--watch follows the drivers of a store, which MLflow does not show"
        raise UsageError(f"{text}; leave out --tracking-uri, or leave out --watch")
    store = shared.open_store(options.store)
    states: dict[str, str] = {}
    while True:
        is_driven = store.is_driven(name)  # before the trials, so that the last report has them all
        began, before = time.monotonic(), states
        states = {trial: store.status(trial) or "missing" for trial in store.sweep_trials(name)}
        counts = Counter(states.values())
        if states != before:
            with store.report_lock(name).hold():  # a driver that ends writes the report, too
                folder, _ = _write_report(options, name, sections)
            facts = {"sweep": name, "report": str(folder), "states": dict(counts)}
            shown = ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))
            line = f"{time.strftime('%H:%M:%S')}  {name}: {shown}  {folder / 'report.html'}"
            print(json.dumps(facts) if options.json else line, flush=True)
        if not is_driven:
            if counts["missing"] and not options.json:
                print(f"no driver runs {name}; `kvlab submit` goes on with what is missing")
            return
        time.sleep(max(WATCH_SECONDS, time.monotonic() - began))


def _write_report(
    options: argparse.Namespace, name: str, sections: tuple[str, ...] | None
) -> tuple[Path, str]:
    """Write the report and return its folder and its answer."""
    if options.tracking_uri is None and options.mirrored_by is not None:
        text = f"--mirrored-by = {options.mirrored_by} is read only with --tracking-uri"
        raise UsageError(f"{text}; add it, or leave --mirrored-by out")
    with ExitStack() as stack:
        if options.tracking_uri is None:
            store = shared.open_store(options.store)
        else:
            from kvlab.track import fetch_record

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            store = fetch_record(options.tracking_uri, name, folder, options.mirrored_by)
        if options.strict:
            check_record(store, name)
        study = Study.load(store, name, sections)
        return write_study_report(store, study, Path(options.reports)), answer_text(study)
