"""Write the report of a sweep: Markdown, HTML, tables, figures, rows of results, and its answer."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import flatten_row
from kvlab.errors import UsageError
from kvlab.fs.atomic_files import write_atomic
from kvlab.report import document as doc
from kvlab.report.figures import render_files
from kvlab.report.html_page import render_html
from kvlab.report.markdown import render_markdown
from kvlab.report.sections import choose_sections, explain_unknown_section, make_answer
from kvlab.report.table_export import table_to_csv, table_to_latex, write_csv
from kvlab.store import Store
from kvlab.store.record_forms import refuse_malformed


def write_report(
    store: Store | str | Path,
    sweep_name: str,
    folder: str | Path,
    sections: Sequence[str] | None = None,
) -> Path:
    """Write a sweep's report to ``folder/<sweep_name>/``.

    The folder holds ``report.md``, ``report.html`` (self-contained), ``results.jsonl`` and
    ``results.csv`` (one row per trial), ``tables/`` (CSV and LaTeX) and ``figures/`` (SVG and
    PNG). The files depend on the record alone: the same record gives the same bytes in any
    folder. Trials that have not ended are reported as missing.

    Args:
        sections: Names of the sections, in order. Default: those that the sweep asks for.

    Returns:
        The report's folder.

    Raises:
        UsageError: The store has no such sweep, or a section is unknown.
        StoreError: The record is damaged, or the folder cannot be written.
    """
    store = store if isinstance(store, Store) else Store(Path(store))
    return write_study_report(store, Study.load(store, sweep_name, sections), folder)


def write_study_report(store: Store, study: Study, folder: str | Path) -> Path:
    """Write the report of a study that was loaded from a store; see `write_report`."""
    document, own = make_document(study), Path(folder) / study.name
    with refuse_malformed(study.name):
        files: dict[Path, bytes | str] = {
            own / "report.md": render_markdown(document),
            own / "report.html": render_html(document),
            own / "results.jsonl": results_jsonl(study),
            own / "results.csv": results_csv(study),
        }
        for table in document.tables:
            files[own / "tables" / f"{table.name}.csv"] = table_to_csv(table)
            files[own / "tables" / f"{table.name}.tex"] = table_to_latex(table)
        for figure in document.figures:
            svg, png = render_files(figure.plot, figure.name)
            files[own / "figures" / f"{figure.name}.svg"] = svg
            files[own / "figures" / f"{figure.name}.png"] = png
    for path, content in files.items():
        write_atomic(path, content)
    for path in (*(own / "tables").glob("*"), *(own / "figures").glob("*")):
        if path.suffix in (".csv", ".tex", ".svg", ".png") and path not in files:
            path.unlink()  # of an earlier report
    if study.tests is None and study.done_rows:
        store.note_report(study.name, study.seeds)
    return own


def make_document(study: Study) -> doc.Document:
    """Run the section functions on a study; drop the sections that have no content.

    The study's own choice of sections is used, and none of them is folded. Without one, all
    sections run, except those about quality if no weights were trained.

    Raises:
        UsageError: A chosen section is not in the table of sections.
    """
    table = choose_sections(study.search is not None)
    for name in study.sections or ():
        if name not in table:
            text = f"report.sections = {name} {explain_unknown_section(name, table)}"
            raise UsageError(f"{text}; or choose others with --sections")
    default = (
        name for name, entry in table.items() if not (study.is_untrained and entry.compares_quality)
    )
    with refuse_malformed(study.name):
        made = {name: table[name].make(study) for name in study.sections or default}
    sections: dict[str, doc.Section] = {}
    shown: set[str] = set()  # a figure is shown where it comes first
    for name, section in made.items():
        if section is not None:
            own = section.contents
            own = tuple(c for c in own if not isinstance(c, doc.Figure) or c.name not in shown)
            shown |= {content.name for content in own if isinstance(content, doc.Figure)}
            is_appendix = section.is_appendix and not study.sections
            sections[name] = replace(section, contents=own, is_appendix=is_appendix)
    return doc.Document(study.name, sections)


def answer_text(study: Study) -> str:
    """Return the answer of a report as plain text: its lead, its bullets, and what it stresses.

    What it stresses are the paragraphs that begin in bold and go on: the report is partial, or the
    record does not verify. The section's figures, tables and other paragraphs are left out. Each
    paragraph is one line, each item of a list one that begins with a hyphen.
    """
    with refuse_malformed(study.name):
        section = make_answer(study)
    lines: list[str] = []
    for content in section.contents:
        match content:
            case doc.Paragraph(spans, "lead") | doc.Paragraph((doc.Strong(), _, *_) as spans):
                lines.append(doc.plain_text(spans))
            case doc.Bullets(items):
                lines += [f"- {doc.plain_text(item)}" for item in items]
    return "\n".join(" ".join(line.split()) for line in lines)


def results_jsonl(study: Study) -> str:
    """Return one JSON object per cell and seed, in the design's order."""
    return "".join(json.dumps(row) + "\n" for row in _flatten_rows(study))


def results_csv(study: Study) -> str:
    """Return the rows of `results_jsonl` as CSV; lists are JSON, absent values empty."""
    rows = _flatten_rows(study)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return write_csv(names, ([row.get(name) for name in names] for row in rows))


def _flatten_rows(study: Study) -> list[dict[str, Any]]:
    """Return the rows; those of a search with their settings."""
    rows = []
    suggestions = {} if study.search is None else study.search.by_level
    for row in study.rows:
        flat = flatten_row(row, tuple(study.factors))
        if row.levels[0] in suggestions:
            settings = suggestions[row.levels[0]].settings.items()
            flat |= {f"setting.{key}": value for key, value in settings}
        rows.append(flat)
    return rows
