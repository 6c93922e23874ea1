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
from kvlab.cli.shared_arguments import add_json, add_reports, add_store, open_store, sweep_name
from kvlab.cli.terminal import print_answer
from kvlab.errors import UsageError
from kvlab.humanize import format_count
from kvlab.report import answer_text, write_study_report
from kvlab.report.confirmation import write_confirmation
from kvlab.report.paper import COLUMN_WIDTH, PAGE_WIDTH, PaperFolder
from kvlab.report.sections import SEARCH_SECTIONS, SECTIONS, explain_unknown_section
from kvlab.store import Store
from kvlab.store.verification import check_record

WATCH_SECONDS = 2.0
"""Pause between two looks at the record."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="SWEEP", help="name or file of a submitted sweep")
    add_store(parser, archive=True)
    add_reports(parser)
    parser.add_argument(
        "--sections",
        metavar="A,B",
        help="sections in order (default: those that the sweep names, else all)",
    )
    parser.add_argument(
        "--paper",
        metavar="DIR",
        help="also write LaTeX and PDF files for a paper: table, figures, methods, references",
    )
    parser.add_argument(
        "--paper-width",
        type=paper_width,
        metavar="WIDTH",
        help="with --paper: column (3.25 in), page (6.75 in) or inches (default: column)",
    )
    parser.add_argument(
        "--confirm",
        metavar="FILE",
        help="of a search: write the sweep that repeats its best trials on fresh seeds, no report",
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
    parser.add_argument(
        "--watch",
        action="store_true",
        help="write it again whenever a trial has ended, as long as a driver runs the sweep",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="write no report if a file of the record is not what was written",
    )
    add_json(parser)


def paper_width(text: str) -> float:
    """Parse the width of a paper's figures: a name, or inches."""
    named = {"column": COLUMN_WIDTH, "page": PAGE_WIDTH}
    if text in named:
        return named[text]
    try:
        inches = float(text)
    except ValueError:
        inches = 0.0
    if not 2 <= inches <= 12:
        rule = "is not column, page or a number of inches from 2 to 12"
        raise argparse.ArgumentTypeError(f"{text} {rule}")
    return inches


def run(options: argparse.Namespace) -> int:
    name, paper = sweep_name(options.sweep), _parse_paper(options)
    sections = _parse_sections(options.sections)
    if options.confirm is not None:
        return _confirm(options, name)
    if options.watch:
        return _watch(options, name, sections, paper)
    folder, answer = _write_report(options, name, sections, paper)
    if options.json:
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
        facts = {"sweep": name, "report": str(folder), "answer": answer, "files": files}
        print(json.dumps(facts | ({"paper": str(paper.folder)} if paper else {}), indent=1))
        return 0
    print_answer(answer, folder, sys.stdout)
    print(folder / "report.md")
    if paper:
        parts = sorted(path.name for path in (paper.folder / name).glob("*.*"))
        print(f"{paper.folder / name}: {', '.join(parts)}")
        print(f"{paper.main} shows them: pdflatex main && bibtex main, then pdflatex main twice")
    return 0


def _confirm(options: argparse.Namespace, name: str) -> int:
    """Write the sweep that confirms the best trials of a search."""
    others = {"--paper": options.paper, "--sections": options.sections, "--watch": options.watch}
    others["--tracking-uri"] = options.tracking_uri
    for other, value in others.items():
        if value:
            text = f"--confirm writes a sweep and no report, which {other} is about"
            raise UsageError(f"{text}; leave one of them out")
    write_confirmation(Study.load(open_store(options.store), name), Path(options.confirm))
    if options.json:
        print(json.dumps({"sweep": name, "confirmation": options.confirm}, indent=1))
        return 0
    print(options.confirm)
    print(f"next: kvlab plan {options.confirm}")
    return 0


def _watch(
    options: argparse.Namespace,
    name: str,
    sections: tuple[str, ...] | None,
    paper: PaperFolder | None,
) -> int:
    """Write the report whenever a trial has ended, until no driver runs the sweep any more.

    A report takes at most half of a core: the pause after it is as long as it took.
    """
    if options.tracking_uri is not None:
        text = "--watch follows the drivers of a store, which MLflow does not show"
        raise UsageError(f"{text}; leave out --tracking-uri, or leave out --watch")
    store = open_store(options.store)
    watched = EndedTrials(store, name)
    while True:
        is_driven = store.is_driven(name)  # before the trials, so that the last report has them all
        began = time.monotonic()
        if watched.read_changes():
            with store.report_lock(name).hold():  # a driver that ends writes the report, too
                measured = paper if watched.counts["done"] else None
                folder, _ = _write_report(options, name, sections, measured)
            facts = {"sweep": name, "report": str(folder), "states": dict(watched.counts)}
            line = f"{time.strftime('%H:%M:%S')}  {watched.describe()}  {folder / 'report.html'}"
            print(json.dumps(facts) if options.json else line, flush=True)
        if not is_driven:
            if watched.missing and not options.json:
                print(f"no driver runs {name}; `kvlab submit` goes on with what is missing")
            return 0
        time.sleep(max(WATCH_SECONDS, time.monotonic() - began))


class EndedTrials:
    """The trials of a sweep that have ended, and how.

    Attributes:
        counts: Trials by status; ``missing`` are those that have not ended.
    """

    def __init__(self, store: Store, name: str):
        self._store, self._name = store, name
        self._states: dict[str, str] | None = None
        self.counts: Counter[str] = Counter()

    @property
    def missing(self) -> int:
        return self.counts["missing"]

    def read_changes(self) -> bool:
        """Read the record; return whether it differs from the last time, or is read first."""
        before = self._states or {}
        self._states = {
            trial: before[trial]  # a trial that is done stays so
            if before.get(trial) == "done"
            else self._store.status(trial) or "missing"
            for trial in self._store.sweep_trials(self._name)
        }
        is_first = not self.counts
        self.counts = Counter(self._states.values())
        return is_first or self._states != before

    def describe(self) -> str:
        """Return how many trials have ended, and how."""
        total = sum(self.counts.values())
        states = (f"{count} {state}" for state, count in sorted(self.counts.items()))
        how = ", ".join(state for state in states if not state.endswith("missing"))
        ended = f"{self._name}: {total - self.missing} of {format_count(total, 'trial')} ended"
        return f"{ended} ({how})" if how else ended


def _parse_paper(options: argparse.Namespace) -> PaperFolder | None:
    if options.paper is not None:
        return PaperFolder(Path(options.paper), options.paper_width or COLUMN_WIDTH)
    if options.paper_width is not None:
        text = f"--paper-width = {options.paper_width:g} means nothing without a paper"
        raise UsageError(f"{text}; add --paper DIR, or leave it out")
    return None


def _write_report(
    options: argparse.Namespace,
    name: str,
    sections: tuple[str, ...] | None,
    paper: PaperFolder | None,
) -> tuple[Path, str]:
    """Write the report and return its folder and its answer."""
    if options.tracking_uri is None and options.mirrored_by is not None:
        text = f"--mirrored-by = {options.mirrored_by} means nothing for a store"
        raise UsageError(f"{text}; add --tracking-uri, or leave it out")
    with ExitStack() as stack:
        if options.tracking_uri is None:
            store = open_store(options.store)
        else:
            from kvlab.track import fetch_record

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            store = fetch_record(options.tracking_uri, name, folder, options.mirrored_by)
        if options.strict:
            check_record(store, name)
        study = Study.load(store, name, sections)
        return write_study_report(store, study, Path(options.reports), paper), answer_text(study)


def _parse_sections(text: str | None) -> tuple[str, ...] | None:
    names = None if text is None else tuple(name.strip() for name in text.split(","))
    for name in names or ():
        if name not in SECTIONS and name not in SEARCH_SECTIONS:
            raise UsageError(f"--sections = {name} {explain_unknown_section(name)}")
        if names is not None and names.count(name) > 1:
            raise UsageError(f"--sections names {name} twice; name each once")
    return names
