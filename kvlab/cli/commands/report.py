"""`kvlab report`: write the report of a sweep again, from its record or from MLflow."""

import argparse
import json
import tempfile
from pathlib import Path

from kvlab.cli.shared_arguments import add_json, add_store, sweep_name
from kvlab.errors import UsageError
from kvlab.report import write_report
from kvlab.report.paper_files import COLUMN_WIDTH, PAGE_WIDTH, PaperFolder
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
    folder = _write_report(options, name, _parse_sections(options.sections), paper)
    if options.json:
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
        facts = {"sweep": name, "report": str(folder), "files": files}
        print(json.dumps(facts | ({"paper": str(paper.folder)} if paper else {}), indent=1))
        return 0
    print(folder / "report.html")
    print(folder / "report.md")
    if paper:
        print(f"{paper.folder / name}: ablation.tex, figures.tex, methods.tex, references.bib")
        print(f"{paper.main} shows them: pdflatex main && bibtex main, then pdflatex main twice")
    return 0


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
) -> Path:
    """Write the report and return its folder."""
    if options.tracking_uri is None:
        if options.mirrored_by is not None:
            text = f"--mirrored-by = {options.mirrored_by} means nothing for a store"
            raise UsageError(f"{text}; add --tracking-uri, or leave it out")
        return write_report(Store(options.store), name, Path(options.out), sections, paper)
    from kvlab.track import fetch_record

    with tempfile.TemporaryDirectory() as folder:
        uri, mirrored_by = options.tracking_uri, options.mirrored_by
        store = fetch_record(uri, name, Path(folder), mirrored_by)
        return write_report(store, name, Path(options.out), sections, paper)


def _parse_sections(text: str | None) -> tuple[str, ...] | None:
    names = None if text is None else tuple(name.strip() for name in text.split(","))
    for name in names or ():
        if name not in SECTIONS:
            raise UsageError(f"--sections = {name} {explain_unknown_section(name)}")
        if names is not None and names.count(name) > 1:
            raise UsageError(f"--sections names {name} twice; name each once")
    return names
