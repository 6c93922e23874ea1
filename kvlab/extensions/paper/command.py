"""`kvlab paper`: write LaTeX and PDF files for a paper from the record of a sweep."""

import argparse
from pathlib import Path

from kvlab.analysis.study import Study
from kvlab.cli import shared_arguments as shared
from kvlab.cli.terminal import print_result
from kvlab.errors import UsageError
from kvlab.extensions.paper.paper import PAGE_WIDTH, PaperFolder, write_paper
from kvlab.report.report_files import make_document
from kvlab.report.table_export import COLUMN_WIDTH
from kvlab.store.record_forms import refuse_malformed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_record(parser, "name or file of a submitted sweep", archive=True)
    text = "folder of the paper; the sweep's files are in one of its name"
    parser.add_argument("folder", metavar="DIR", help=text)
    text = "column (3.25 in), page (6.75 in) or inches (default: column)"
    parser.add_argument("--width", type=parse_width, metavar="WIDTH", default="column", help=text)


def parse_width(text: str) -> float:
    """Parse the width of a paper's figures: a name, or inches."""
    width = {"column": COLUMN_WIDTH, "page": PAGE_WIDTH}.get(text) or shared.parse_number(text)
    if not 2 <= width <= 12:
        rule = "is not column, page or a number of inches from 2 to 12"
        raise argparse.ArgumentTypeError(f"{text} {rule}")
    return width


def run(options: argparse.Namespace) -> None:
    name, paper = shared.sweep_name(options.sweep), PaperFolder(Path(options.folder), options.width)
    study = Study.load(shared.open_store(options.store), name)
    if study.search is not None and not study.search.eligible:
        rule = "a paper shows a measured configuration within the limits"
        raise UsageError(f"{name} has none, and {rule}; submit the search again to go on")
    if not study.done_rows:
        raise UsageError(f"no trial of {name} is done, and a paper shows results; run one first")
    with refuse_malformed(name):
        write_paper(study, make_document(study), paper)
    parts = sorted(path.name for path in (paper.folder / name).glob("*.*"))
    text = f"{paper.folder / name}: {', '.join(parts)}\n{paper.main} shows them: pdflatex main && "
    text += "bibtex main, then pdflatex main twice"
    print_result(options, {"sweep": name, "paper": str(paper.folder), "files": parts}, text)
