"""`kvlab findings`: write what the records say of the articles' claims, and of the sweeps."""

import argparse
import tempfile
from pathlib import Path

from kvlab.cli.shared_arguments import add_flag, add_reports
from kvlab.extensions.findings.claims import load_claims
from kvlab.extensions.findings.pages import PAGE, fill_study_tables, make_findings, read_studies
from kvlab.fs.atomic_files import write_atomic

EPILOG = """\
It reads REPORTS/claims.yaml and every REPORTS/NAME/record.tar.xz, and writes REPORTS/FINDINGS.md.
In sweeps/README.md beside REPORTS, if there is one, it writes the questions and the verdicts of the
tables of sweeps. `kvlab copy NAME --to REPORTS/NAME/record.tar.xz` writes a record.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reports(parser)
    add_flag(parser, "--check", "write nothing; exit with 1 if a page is out of date")


def run(options: argparse.Namespace) -> int:
    reports = Path(options.reports)
    sweeps_page = reports.parent / "sweeps" / "README.md"
    claims, document = load_claims(reports / "claims.yaml")
    with tempfile.TemporaryDirectory() as folder:
        studies = read_studies(reports, Path(folder))
        pages = {reports / PAGE: make_findings(claims, document, studies)}
        if sweeps_page.is_file():
            text = sweeps_page.read_text(encoding="utf-8")
            pages[sweeps_page] = fill_study_tables(text, sweeps_page.parent, studies)
    is_current = True
    for path, text in pages.items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        is_current = False
        if options.check:
            print(f"{path}: is not what the records say; run `kvlab findings`")
        else:
            write_atomic(path, text)
            print(path)
    if is_current:
        print("every page is what the records say")
    return int(options.check and not is_current)
