"""Probes: associative recall, the needle, and loss by position in the context."""

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Column,
    Content,
    Figure,
    Heading,
    Row,
    Section,
    Table,
    cell,
    paragraph,
)
from kvlab.report.figures.plot import SERIES, Axis, Line, Plot, Point
from kvlab.report.formatting import PLUS_MINUS, display_unit, format_metric
from kvlab.report.needle_tables import needle_contents
from kvlab.report.table_columns import mean_cell, mean_column

_RECALL = {"recall_acc": "all", "recall_acc_near": "near", "recall_acc_far": "far"}
_POSITIONS = {f"loss_part{i}": f"{i}/8" for i in range(1, 9)} | {"loss_beyond": "beyond"}
_SCORINGS = {"": "one-shot", "_served": "served"}


def report_probes(study: Study) -> Section | None:
    """Report what average loss hides."""
    contents = [*_recall(study), *needle_contents(study), *_positions(study)]
    return Section("Probes", tuple(contents)) if contents else None


def _recall(study: Study) -> list[Content]:
    if "recall_acc" not in study.measured_metrics:
        return []
    pairs = sorted({int(row.measurements["recall_pairs"]) for row in study.done_rows
                    if "recall_pairs" in row.measurements})  # fmt: skip
    chances = " or ".join(f"1 in {count}" for count in pairs)
    text = (
        "Random keys, each with a random value, and then the keys again: the share of repeated"
        f" keys at which the model prefers the right value. Guessing gives {chances}. Near is at"
        " most a quarter of the context back, far more than half of it."
    )
    caption = "Values recalled (%), mean over seeds."
    columns_by_metric = {
        name: head for name, head in _RECALL.items() if name in study.measured_metrics
    }
    table = _table(study, "recall", caption, columns_by_metric)
    return [Heading("Associative recall"), paragraph(text), table]


def _positions(study: Study) -> list[Content]:
    if "loss_part1" not in study.measured_metrics:
        return []
    beyond = "loss_beyond" in study.measured_metrics
    text = (
        "Loss in each eighth of the context, the earliest first. The tokens of a part are the same"
        " for every cell, so cells compare at a part better than parts do in a cell. Where a"
        " layer sees only a window, or the cache keeps less, later parts gain less from the text"
        " before them."
    )
    if beyond:
        text += " Beyond are positions up to twice the trained length; learned positions have none."
    columns_by_metric = {
        name: head for name, head in _POSITIONS.items() if name in study.measured_metrics
    }
    caption = "Nats a token by part of the context, mean over seeds."
    table = _table(study, "positions", caption, columns_by_metric)
    return [Heading("Loss by position"), paragraph(text), *_position_figure(study), table]


def _position_figure(study: Study) -> list[Content]:
    """Plot the cells that differ least from the baseline, as many as there are colours."""
    served = "loss_part1_served" in study.measured_metrics
    lines: list[Line] = []
    for levels in sorted(study.cells, key=study.n_changed_factors):
        points = _points(study, levels, "_served" if served else "")
        if points and len(lines) < len(SERIES):
            colour, dashed = SERIES[len(lines)], len(lines) % 2 == 1
            lines.append(Line(study.label(levels), points, colour, dashed=dashed))
    if not lines:
        return []
    scoring = "through the serving cache" if served else "one-shot"
    caption = f"Loss by part of the context, {scoring}."
    end_losses = "; ".join(
        f"{line.name} goes from {format_metric('loss', line.points[0].y)}"
        f" to {format_metric('loss', line.points[-1].y)}"
        for line in lines
    )
    n_lines = format_count(len(lines), "line")
    drawn_note = (
        f" {n_lines} of {format_count(len(study.cells), 'cell')}." if len(lines) > 1 else ""
    )
    plot = Plot(Axis("eighth of the context"), Axis("loss (nats/token)"), tuple(lines))
    return [Figure("positions", f"{caption}{drawn_note}", f"{caption} {end_losses}.", plot)]


def _points(study: Study, levels: Levels, ending: str) -> tuple[Point, ...]:
    label, key, points = study.label(levels), study.cell_key(levels), []
    for part in range(1, 9):
        values = list(study.values(levels, f"loss_part{part}{ending}").values())
        if values:
            mean = sum(values) / len(values)
            tip = (label, f"eighth {part} of 8", f"loss {format_metric('loss', mean)}")
            points.append(Point(float(part), mean, tip, key))
    return tuple(points)


def _table(study: Study, name: str, caption: str, heads: dict[str, str]) -> Table:
    columns = (
        Column("cell"),
        Column("scored"),
        *(mean_column(head, display_unit(metric)) for metric, head in heads.items()),
    )
    rows = []
    for levels in study.cells:
        for ending, scoring in _SCORINGS.items():
            entries = [mean_cell(study, levels, f"{metric}{ending}") for metric in heads]
            if any(entry is not EMPTY_CELL for entry in entries):
                names = (cell(study.label(levels)), cell(scoring))
                rows.append(Row((*names, *entries), study.cell_key(levels)))
    seeds = f" {format_count(len(study.seeds), 'seed')}." if len(study.seeds) > 1 else ""
    spread = f" {PLUS_MINUS} is the standard deviation." if seeds else ""
    return Table(name, f"{caption}{seeds}{spread}", columns, tuple(rows))
