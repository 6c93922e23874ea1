"""Write what a paper needs of a sweep: a table, figures, methods and references, in LaTeX.

The files follow from the record alone: the same record gives the same bytes, PDF files included.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvlab.analysis.search_results import SearchResults, SuggestedTrial
from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.fs.atomic_files import write_atomic
from kvlab.humanize import format_count
from kvlab.report.ablation import AblationRow, list_ablation
from kvlab.report.document import Document, Figure
from kvlab.report.figures.axes import draw_plot, figure_style
from kvlab.report.figures.plot import Plot
from kvlab.report.formatting import (
    difference_unit,
    format_binary_size,
    format_difference,
    format_fixed,
    format_metric,
    format_percent,
    format_ratio,
    format_signed,
    in_display_unit,
)
from kvlab.report.paper_methods import write_methods
from kvlab.report.paper_search import describe_search
from kvlab.report.paper_text import list_citations, write_bibliography
from kvlab.report.search_tables import base_row, describe_limits, objective_title, trials_table
from kvlab.report.table_export import escape_latex
from kvlab.store.metrics import METRICS

COLUMN_WIDTH = 3.25
"""Inches of a column in a page of two, as in the styles of ICML."""

PAGE_WIDTH = 6.75
"""Inches of both columns with the space between them."""

MAX_ROWS = 16
"""Cells in the table: what half a column holds."""

MAX_DECIMALS = 6

DRAWN_FIGURES = ("pareto", "effects", "curves")
"""Figures of a report that a paper gets, in order, if the report has them."""


@dataclass(frozen=True)
class PaperFolder:
    """Where a paper's files go.

    Attributes:
        folder: The folder of the paper. The files of a sweep are in ``folder/<its name>/``.
        width: Width of the table and of the figures, in inches.
    """

    folder: Path
    width: float = COLUMN_WIDTH

    @property
    def main(self) -> Path:
        """The document that shows every part, or the author's own of that name."""
        return self.folder / "main.tex"


def write_paper(study: Study, document: Document, paper: PaperFolder) -> None:
    """Write the files of a sweep, and ``main.tex`` if the folder has none.

    Args:
        study: The study.
        document: Its report, whose figures are drawn.
        paper: Where the files go. A ``main.tex`` that is there is never replaced.
    """
    own, width = paper.folder / study.name, paper.width
    figures = _select_figures(study, document)
    texts = {"figures.tex": _write_figures(study, figures, width)}
    if study.search is None:
        texts |= {"ablation.tex": write_ablation(study, width), "methods.tex": write_methods(study)}
    else:
        texts["configurations.tex"] = write_configurations(study, study.search, width)
        texts["methods.tex"] = write_methods(study, describe_search(study))
    cited = list_citations("".join(texts.values()))
    contents: dict[Path, str | bytes] = {own / name: text for name, text in texts.items()}
    contents[own / "references.bib"] = write_bibliography(cited)
    for figure in figures:
        path = own / "figures" / f"{figure.name}.pdf"
        contents[path] = render_pdf(figure.plot, figure.name, width)
    if not paper.main.exists():
        contents[paper.main] = _write_main(study)
    for path, content in contents.items():
        write_atomic(path, content)
    for path in (own / "figures").glob("*.pdf"):
        if path not in contents:  # of an earlier report
            path.unlink()


def _write_main(study: Study) -> str:
    """Return a document that shows every part."""
    template = (files("kvlab.report") / "paper_main.tex").read_text("utf-8")
    title = escape_latex(str(study.sweep.get("question") or study.name))
    table, sentence = "ablation", "compares every cell with the baseline"
    if study.search is not None:
        table, sentence = "configurations", "has the best configurations of the search"
    template = template.replace("TABLE-NAME", table).replace("TABLE-SENTENCE", sentence)
    return template.replace("SWEEP-NAME", study.name).replace("SWEEP-TITLE", title)


def _select_figures(study: Study, document: Document) -> list[Figure]:
    """Return the figures of a report that its paper gets: of a search, its history and front."""
    if study.search is None:
        return [f for name in DRAWN_FIGURES for f in document.figures if f.name == name]
    kinds = ("history-", "front-")
    return [f for kind in kinds for f in document.figures if f.name.startswith(kind)]


# Figures


def render_pdf(plot: Plot, name: str, width: float) -> bytes:
    """Render a plot as one PDF page, with text of 8 pt and fonts embedded as TrueType.

    Args:
        plot: The plot.
        name: Name of the figure.
        width: Width of the page, in inches.
    """
    with figure_style(name, PDF_STYLE):
        figure, pdf = draw_plot(plot, width), io.BytesIO()
        no_metadata = {"CreationDate": None, "Creator": None, "Producer": None}
        figure.savefig(pdf, format="pdf", metadata=no_metadata)
    return pdf.getvalue()


PDF_STYLE: dict[str, Any] = {
    "font.family": ["STIXGeneral", "DejaVu Sans"],  # the first is drawn after Times
    "font.size": 8.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.0,
    "mathtext.fontset": "stix",
    "lines.linewidth": 1.0,
    "lines.markersize": 4.0,
    "pdf.fonttype": 42,  # TrueType: publishers refuse the default, Type 3
}


def _write_figures(study: Study, figures: Sequence[Figure], width: float) -> str:
    """Return a float for each figure, with its caption and label."""
    star = "*" if width > COLUMN_WIDTH else ""
    parts = []
    for figure in figures:
        place = f"{study.name}/figures/{figure.name}.pdf"
        caption = figure.caption if study.search is None else _write_search_text(figure)
        parts.append(
            f"\\begin{{figure{star}}}[tbp]\n\\centering\n\\includegraphics{{{place}}}\n"
            f"\\caption{{{_escape_prose(caption)}}}\n"
            f"\\label{{fig:{study.name}-{figure.name}}}\n\\end{{figure{star}}}\n"
        )
    return "\n".join(parts)


def _write_search_text(figure: Figure) -> str:
    """Return the caption of a search's figure with the numbers that it shows."""
    is_history = figure.name.startswith("history-")
    return f"{figure.alt} The line is the best so far." if is_history else figure.alt


def _escape_prose(text: str) -> str:
    """Escape a sentence; its apostrophes stay apostrophes."""
    return escape_latex(text).replace("\\textquotesingle{}", "'")


# The table


def write_ablation(study: Study, width: float) -> str:
    """Return the compact ablation as a float of booktabs rules.

    It needs the packages booktabs and graphicx. A table that is wider than its column is scaled
    down to it.

    Args:
        study: The study.
        width: Width in inches; above `COLUMN_WIDTH` the float spans both columns.
    """
    rows = list_ablation(study, MAX_ROWS)
    columns = _choose_columns(study, rows)
    table = _LatexTable(
        f"tab:{study.name}-ablation",
        _write_caption(study, rows, columns),
        ["cell", *(column.head for column in columns)],
        "l" + "".join(column.alignment for column in columns),
        [_write_row(study, row, columns) for row in rows],
    )
    return table.write(width)


def write_configurations(study: Study, search: SearchResults, width: float) -> str:
    """Return the best configurations of a search as a float of booktabs rules.

    With several objectives these are the front, else the best in the objective; the base
    experiment comes last.

    Args:
        study: The study.
        search: What it has found.
        width: As of `write_ablation`.
    """
    is_front = len(search.objectives) > 1
    trials = (list(search.best) if is_front else search.ranked(0))[:MAX_ROWS]
    table = trials_table(study, search, "best", "", trials)
    shown = [n for n, column in enumerate(table.columns) if column.title != "id"]
    columns = [table.columns[n] for n in shown]
    return _LatexTable(
        f"tab:{study.name}-configurations",
        _write_search_caption(study, search, trials),
        [escape_latex("KV" if c.title == _KV_TITLE else c.title) for c in columns],
        "".join("r" if column.numeric else "l" for column in columns),
        [
            " & ".join(escape_latex(row.cells[n].text) for n in shown) + " \\\\"
            for row in table.rows
        ],
    ).write(width)


_KV_TITLE = objective_title("kv_bytes")


def _write_search_caption(
    study: Study, search: SearchResults, trials: Sequence[SuggestedTrial]
) -> str:
    """Return the caption: which configurations, of how many, and how far to trust them."""
    measured = sum(one.is_measured for one in search.trials)
    goals = " and ".join(objective_title(one.name) for one in search.objectives)
    which = f"The {len(trials)} configurations with the best {goals}"
    if len(search.objectives) > 1:
        count = len(search.best)
        some = f"{len(trials)} of the {count}" if len(trials) < count else f"The {count}"
        which = f"{some} configurations on the front of {goals}"
    if len(trials) == 1:
        which = f"The configuration with the best {goals}"
    limits = describe_limits(search)
    under = f", with {limits}" if limits else ""
    seeds = ", ".join(map(str, study.seeds))
    text = (
        f"{which}, of {measured:,} measured{under}. Each was trained once, at seed {seeds}, so the"
        " best is flattered by its selection"
    )
    base = "; the last row is the base experiment" if base_row(study) is not None else ""
    return _escape_prose(f"{text}{base}. KV: {_KV_TITLE.removeprefix('KV ')}.")


@dataclass(frozen=True)
class _LatexTable:
    """A float of booktabs rules.

    Attributes:
        label, caption, heads: LaTeX.
        alignment: One letter for each column.
        rows: LaTeX, each with its end.
    """

    label: str
    caption: str
    heads: Sequence[str]
    alignment: str
    rows: Sequence[str]

    def write(self, width: float) -> str:
        """Return the float, scaled down to its column if it is wider; see `write_ablation`."""
        star, line = ("*", "\\textwidth") if width > COLUMN_WIDTH else ("", "\\columnwidth")
        body = "\n".join(self.rows)
        return f"""% Needs \\usepackage{{booktabs,graphicx}}.
\\begin{{table{star}}}[tbp]
\\centering
\\caption{{{self.caption}}}
\\label{{{self.label}}}
\\smallskip\\footnotesize\\setlength{{\\tabcolsep}}{{3pt}}%
\\setbox0=\\hbox{{%
\\begin{{tabular}}{{@{{}}{self.alignment}@{{}}}}
\\toprule
{" & ".join(self.heads)} \\\\
\\midrule
{body}
\\bottomrule
\\end{{tabular}}}}%
\\ifdim\\wd0>{line}\\resizebox{{{line}}}{{!}}{{\\box0}}\\else\\leavevmode\\box0\\fi
\\end{{table{star}}}
"""


@dataclass(frozen=True)
class _Column:
    """One column of the table.

    Attributes:
        head: Its LaTeX.
        alignment: Of its cells.
        write: Returns the LaTeX of a row's cell; empty without a value.
        note: What the caption says of it.
    """

    head: str
    alignment: str
    write: Callable[[AblationRow], str]
    note: str


def _choose_columns(study: Study, rows: Sequence[AblationRow]) -> list[_Column]:
    """Return the columns that have something to say about these rows."""
    columns: list[_Column] = []
    if not study.is_untrained:
        columns += _difference_columns(study, rows)
    context = study.block_size(study.baseline)
    of_tokens = f" of {context:,} tokens" if context else ""
    size_note = f"KV: cache of one sequence{of_tokens}, and the baseline's size divided by it"
    columns.append(_Column("KV", "r", _write_size, size_note))
    columns.append(_Column("smaller", "r", _write_factor, ""))
    if any(row.parameter_change for row in rows):
        note = "params: change in the number of parameters"
        columns.append(_Column("params", "r", _write_parameters, note))
    if any(row.gap is not None and abs(row.gap.value) >= GAP_ROUNDING for row in rows):
        note = "gap: loss through the cache minus loss in one forward pass, nats/token"
        columns.append(_Column("gap", "r", _write_gap, note))
    return columns


def _difference_columns(study: Study, rows: Sequence[AblationRow]) -> list[_Column]:
    metric = study.primary_metric
    decimals = _choose_decimals(study, rows)
    unit = difference_unit(metric)
    title = METRICS[metric].title + (f" ({unit})" if unit else "")
    seeds = format_count(len(study.seeds), "seed")
    note = (
        f"$\\Delta$: {escape_latex(title)}, minus the baseline's (in brackets), mean over {seeds}"
    )
    difference = _Column("$\\Delta$", "r", partial(_write_difference, study, decimals), note)
    if decimals is None:
        return [difference]
    percent = f"{100 * (1 - study.decide.alpha):g}\\%"
    interval_note = f"simultaneous {percent} intervals, bold where zero is outside"
    if study.decide.margin is not None:
        interval_note += f", $\\dagger$ where the cost is below {study.decide.margin:g}"
    write = partial(_write_interval, study, decimals)
    return [difference, _Column(percent, "r", write, interval_note)]


def _choose_decimals(study: Study, rows: Sequence[AblationRow]) -> int | None:
    """Return the decimals that give the narrowest interval two digits, and show no end as zero.

    None if nothing was tested, so that no interval says how many digits are known.
    """
    metric = study.primary_metric
    intervals = [
        [in_display_unit(metric, end) for end in row.interval] for row in rows if row.interval
    ]
    widths = [high - low for low, high in intervals if high > low]
    if not widths:
        return None
    decimals = max(0, 1 - math.floor(math.log10(min(widths) / 2)))
    while decimals < MAX_DECIMALS and any(
        end and not round(end, decimals) for ends in intervals for end in ends
    ):
        decimals += 1
    return min(decimals, MAX_DECIMALS)


_BOLD = ("better", "worse", "worse within", "higher", "lower")
_WITHIN = ("bounded", "worse within", "equivalent")


def _write_difference(study: Study, decimals: int | None, row: AblationRow) -> str:
    metric = study.primary_metric
    if row.levels == study.baseline:
        return "" if row.value is None else f"({escape_latex(format_metric(metric, row.value))})"
    if row.difference is None:
        return ""
    number = format_difference(metric, row.difference)
    if decimals is not None:
        number = format_signed(in_display_unit(metric, row.difference), decimals)
    text = escape_latex(number)
    if row.verdict_name in _BOLD:
        text = f"\\textbf{{{text}}}"
    return text + ("$^\\dagger$" if row.verdict_name in _WITHIN else "")


def _write_interval(study: Study, decimals: int, row: AblationRow) -> str:
    if row.interval is None:
        return "diverged" if row.verdict_name == "diverged" else ""
    ends = (in_display_unit(study.primary_metric, end) for end in row.interval)
    low, high = (escape_latex(format_fixed(end, decimals)) for end in ends)
    return f"[{low}, {high}]"


def _write_size(row: AblationRow) -> str:
    return "" if row.kv_bytes is None else escape_latex(format_binary_size(row.kv_bytes))


def _write_factor(row: AblationRow) -> str:
    return "" if row.kv_factor is None else escape_latex(format_ratio(row.kv_factor))


def _write_parameters(row: AblationRow) -> str:
    change = row.parameter_change
    if change is None or not change:
        return ""
    return escape_latex(("+" if change > 0 else "") + format_percent(change))


def _write_gap(row: AblationRow) -> str:
    if row.gap is None:
        return ""
    value = row.gap.value
    return "0" if abs(value) < GAP_ROUNDING else escape_latex(format_signed(value, 3))


def _write_row(study: Study, row: AblationRow, columns: Sequence[_Column]) -> str:
    cells = [escape_latex(study.label(row.levels)), *(column.write(row) for column in columns)]
    return f"{' & '.join(cells)} \\\\"


def _write_caption(study: Study, rows: Sequence[AblationRow], columns: Sequence[_Column]) -> str:
    """Return the caption: what is compared, and what each column is."""
    total = len(study.cells)
    some = f" The table has {len(rows)} of {total:,} cells."
    notes = "; ".join(column.note for column in columns if column.note)
    text = (
        f"Ablation of the key-value cache against the baseline.{some if len(rows) < total else ''}"
    )
    return f"{text} {notes[:1].upper()}{notes[1:]}."
