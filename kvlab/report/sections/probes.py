"""Probes: associative recall, the needle, and loss by position in the context."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Figure,
    Heading,
    Row,
    Section,
    Table,
    Tone,
    cell,
    paragraph,
)
from kvlab.report.figures.plot import SERIES, Axis, Line, Plot, Point
from kvlab.report.formatting import (
    PLUS_MINUS,
    display_unit,
    format_fixed,
    format_metric,
    format_percent,
    format_signed,
)
from kvlab.report.table_columns import mean_and_spread, mean_cell, mean_column

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
            mean = math.fsum(values) / len(values)
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


# Needles


NeedleLine = Mapping[str, Any]
"""What one trial recorded of one length and depth; see `kvlab.evaluate.needle.needle_lines`."""

_FOUND_GAIN, _FOUND_ERRORS = 1.0, 2.0
"""A found needle lowers the loss at every seed by more nats per token than the first, beyond the
second in standard errors over rows. Less, such as of a token that is likelier because it occurred,
is no recall, however small its error."""


def needle_contents(study: Study) -> list[Content]:
    """Report the loss of the needle's answer and the share of its tokens on top."""
    lines = [line for row in study.done_rows for line in row.record.get("needle", ())]
    if not lines:
        return []
    return [
        Heading("Needle in a haystack"),
        paragraph(_method(study, lines)),
        _loss_table(study, lines),
        _accuracy_table(study, lines),
    ]


def _method(study: Study, lines: list[NeedleLine]) -> str:
    rows = " or ".join(f"{count:,}" for count in sorted({line["rows"] for line in lines}))
    chances = [line["chance"] for line in lines]
    chance = _range_text(min(chances), max(chances))
    return (
        "A key of random tokens and its answer stand at a depth in validation text, and the key"
        f" again at its end: the loss is that of the answer, over {rows} rows. Depth 0 is the"
        " earliest. Guessing by how often tokens occur in the text costs"
        f" {chance} nats/token. Absent is the loss of the same answer with text in the needle's"
        f" place: this model's own chance. {_summarize(study, lines)}"
    )


def _range_text(low: float, high: float) -> str:
    ends = format_fixed(low, 2), format_fixed(high, 2)
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _summarize(study: Study, lines: list[NeedleLine]) -> str:
    """Say where needles are found, and how many of those are lost when served."""
    places = [by_place for levels in study.cells for by_place in _places(study, levels).values()]
    found = [place for place in places if _is_found(place, "")]
    text = f"One-shot it is found at {len(found)} of {format_count(len(places), 'place')}"
    if any("gain_served" in line for line in lines):
        lost = sum(not _is_found(place, "_served") for place in found)
        text += f", and {lost} of these are lost when served" if found else ""
    if not found:
        gain = format_fixed(max(line["gain"] for line in lines), 3)
        text += f": the needle lowers the loss by at most {gain} nats/token"
        return f"{text}. These models do not recall, so the table shows chance and no reach."
    return f"{text}."


def _places(study: Study, levels: Levels) -> dict[tuple[int, float], list[NeedleLine]]:
    """Return a cell's lines, one a seed, by length and depth."""
    places: dict[tuple[int, float], list[NeedleLine]] = {}
    for row in study.cells[levels].values():
        for line in row.record.get("needle", ()) if row.is_done else ():
            places.setdefault((line["length"], line["depth"]), []).append(line)
    return places


def _is_found(lines: list[NeedleLine], suffix: str) -> bool:
    """Return whether the answer is at least e times as likely as without the needle."""
    name = f"gain{suffix}"
    return all(
        name in line and line[name] > _FOUND_GAIN + _FOUND_ERRORS * line.get(f"{name}_stderr", 0.0)
        for line in lines
    )


def _loss_table(study: Study, lines: list[NeedleLine]) -> Table:
    depths = sorted({line["depth"] for line in lines})
    columns = (
        Column("cell"),
        Column("length", True),
        Column("scored"),
        _number_column("absent", "nats/token", "loss of the same answer without a needle"),
        *(_number_column(_depth_name(depth), "nats/token") for depth in depths),
    )
    rows = []
    for levels, length, by_depth in _by_length(study):
        names = (cell(study.label(levels)), cell(f"{length:,}", length))
        for suffix, scoring in (("", "one-shot"), ("_served", "served")):
            if any(f"loss{suffix}" in line for one in by_depth.values() for line in one):
                absent = next(iter(by_depth.values()))  # the same at every depth
                entries = [
                    _number_cell(by_depth.get(depth, []), f"loss{suffix}", suffix)
                    for depth in depths
                ]
                head = (*names, cell(scoring), _number_cell(absent, f"loss_absent{suffix}", None))
                rows.append(Row((*head, *entries), study.cell_key(levels)))
        changes = [_number_cell(by_depth.get(depth, []), "loss_change", None) for depth in depths]
        if any(change is not EMPTY_CELL for change in changes):
            head = (*names, cell("served minus one-shot", tone="muted"), EMPTY_CELL)
            rows.append(Row((*head, *changes), study.cell_key(levels)))
    caption = (
        f"Loss of the needle's answer (nats/token) by its depth; {_error_note(study)}. In bold:"
        f" found one-shot, at every seed more than {_FOUND_GAIN:g} nat/token below absent, by"
        f" {_FOUND_ERRORS:g} standard errors over rows; lost: found one-shot, and not when served."
    )
    return Table("needle", caption, columns, tuple(rows))


def _accuracy_table(study: Study, lines: list[NeedleLine]) -> Table:
    depths = sorted({line["depth"] for line in lines})
    columns = (
        Column("cell"),
        Column("length", True),
        Column("scored"),
        *(_number_column(_depth_name(depth), "%") for depth in depths),
    )
    rows = []
    for levels, length, by_depth in _by_length(study):
        names = (cell(study.label(levels)), cell(f"{length:,}", length))
        for suffix, scoring in (("", "one-shot"), ("_served", "served")):
            entries = [
                _number_cell(by_depth.get(depth, []), f"accuracy{suffix}", None) for depth in depths
            ]
            if any(entry is not EMPTY_CELL for entry in entries):
                rows.append(Row((*names, cell(scoring), *entries), study.cell_key(levels)))
    caption = f"Answer tokens of the needle that are the likeliest (%); {_error_note(study)}."
    return Table("needle-accuracy", caption, columns, tuple(rows))


def _by_length(study: Study) -> Iterator[tuple[Levels, int, dict[float, list[NeedleLine]]]]:
    for levels in study.cells:
        places = _places(study, levels)
        for length in sorted({length for length, _ in places}):
            by_depth = {depth: one for (other, depth), one in places.items() if other == length}
            yield levels, length, by_depth


def _depth_name(depth: float) -> str:
    return f"depth {format_percent(depth, 0)}"


def _error_note(study: Study) -> str:
    if len(study.seeds) > 1:
        return f"mean {PLUS_MINUS} standard deviation over seeds"
    return f"mean {PLUS_MINUS} standard error over rows"


def _number_column(title: str, unit: str, hint: str = "") -> Column:
    return Column(title, True, hint, (f"{title} ({unit})", f"{title} error ({unit})"))


def _number_cell(lines: list[NeedleLine], name: str, found_suffix: str | None) -> Cell:
    """Return the mean of ``name`` over seeds, with its spread or at one seed its error.

    Args:
        found_suffix: mark the cell if the needle is found one-shot, by whether it is in this way
            of scoring.
    """
    values = [line[name] for line in lines if name in line]
    if not values:
        return EMPTY_CELL
    is_share, is_change = name.startswith("accuracy"), name.endswith("change")
    scale, digits = (100.0, 1) if is_share else (1.0, 3)
    mean, spread = mean_and_spread(values)
    if len(values) == 1:
        spread = lines[0].get(f"{name}_stderr")
    text = (format_signed if is_change else format_fixed)(scale * mean, digits)
    if spread is not None:
        text += f" {PLUS_MINUS} {format_fixed(scale * spread, digits)}"
    tone: Tone = ""
    if found_suffix is not None and _is_found(lines, ""):
        is_found = _is_found(lines, found_suffix)
        tone, text = ("good", text) if is_found else ("bad", f"{text}, lost")
    error = None if spread is None else scale * spread
    return Cell(text, scale * mean, tone, csv=(scale * mean, error))
