"""`write_report`: one sweep's record to its report in every form."""

import json
from collections.abc import Sequence
from pathlib import Path

from kvlab.fs.atomic_files import write_atomic
from kvlab.report.document import Document, make_document
from kvlab.report.figures.layout import lay_out_plot
from kvlab.report.figures.picture import render_picture_files
from kvlab.report.html_page import to_html
from kvlab.report.markdown import to_markdown
from kvlab.report.study import Study
from kvlab.report.table_export import rows_to_csv, to_csv, to_latex
from kvlab.report.trial_rows import flatten_row
from kvlab.store import Store

FIGURE_WIDTH = 820.0
"""Of the figures in files."""


def write_report(
    store: Store | str | Path,
    sweep_name: str,
    folder: str | Path,
    sections: Sequence[str] | None = None,
) -> Path:
    """Writes ``folder/<sweep>/`` and returns it.

    It holds report.md, report.html (which needs no other file), results.jsonl and results.csv
    (a row a trial), ``tables/`` as CSV and LaTeX, and ``figures/`` as SVG and PNG. They depend
    on the record alone: the same record gives the same bytes in any folder. Trials that have not
    ended are said to be missing.

    Args:
        store: of the record.
        sweep_name: of the sweep.
        folder: of reports.
        sections: names in the table of sections, in order; default what the sweep asks for.

    Raises:
        UsageError: the store has no such sweep, or there is no such section.
        StoreError: the record is damaged, or the folder cannot be written.
    """
    store = store if isinstance(store, Store) else Store(Path(store))
    study = Study.load(store, sweep_name)
    if sections is not None:
        study.sections = tuple(sections)
    document = make_document(study)
    target = Path(folder) / study.name
    written = {
        target / "report.md": to_markdown(document),
        target / "report.html": to_html(document),
        target / "results.jsonl": results_jsonl(study),
        target / "results.csv": results_csv(study),
        **{target / "tables" / f"{t.name}.csv": to_csv(t) for t in document.tables},
        **{target / "tables" / f"{t.name}.tex": to_latex(t) for t in document.tables},
        **_draw_figures(document, target / "figures"),
    }
    for path, content in written.items():
        write_atomic(path, content)
    _remove_stale_files(target, set(written))
    return target


def results_jsonl(study: Study) -> str:
    """One JSON object a cell and seed, sorted as the design is."""
    factors = tuple(study.factors)
    return "".join(json.dumps(flatten_row(row, factors)) + "\n" for row in study.rows)


def results_csv(study: Study) -> str:
    """The rows of `results` as CSV; lists as JSON, what a row does not have is empty."""
    factors = tuple(study.factors)
    rows = [flatten_row(row, factors) for row in study.rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return rows_to_csv(names, rows)


def _draw_figures(document: Document, folder: Path) -> dict[Path, bytes | str]:
    found: dict[Path, bytes | str] = {}
    for figure in document.figures:
        svg, png = render_picture_files(lay_out_plot(figure.plot, FIGURE_WIDTH), figure.name)
        found[folder / f"{figure.name}.svg"] = svg
        found[folder / f"{figure.name}.png"] = png
    return found


def _remove_stale_files(target: Path, written: set[Path]) -> None:
    """Tables and figures of an earlier report that this one does not have."""
    for part, endings in (("tables", (".csv", ".tex")), ("figures", (".svg", ".png"))):
        for path in (target / part).glob("*"):
            if path.suffix in endings and path not in written:
                path.unlink()
