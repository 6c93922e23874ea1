"""`kvlab report`: write the report of a sweep again, from its record or from MLflow."""

import argparse
import json
import sys
import tempfile
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
from kvlab.spec import load_sweep
from kvlab.spec.sweep import SweepSource
from kvlab.store.verification import check_record


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
        for other in ("sections", "tracking_uri"):
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
    folder, answer = _write_report(options, name, sections)
    if options.json:
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
        facts = {"sweep": name, "report": str(folder), "answer": answer, "files": files}
        print(json.dumps(facts, indent=1))
        return
    print_answer(answer, folder, sys.stdout)
    print(folder / "report.md")


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
        if options.sweep != name:
            _report_changes(load_sweep(Path(options.sweep)).source, study)
        return write_study_report(store, study, Path(options.reports)), answer_text(study)


def _report_changes(source: SweepSource, study: Study) -> None:
    """Say which files are not those that were submitted."""
    submitted = {"yaml": source.document, "experiment_yaml": source.base_document}
    for key, document in submitted.items():
        if document.text != study.sweep.get(key):
            text = "has changed since it was submitted, and the report is of what was submitted"
            print(f"{document.file} {text}; submit again to report the change", file=sys.stderr)
