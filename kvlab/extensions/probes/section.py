"""What the report says of the probes: associative recall, and a needle in a haystack."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.sections.tasks import scored_table

_RECALL = {f"recall_acc{of}": (of.lstrip("_") or "all", "") for of in ("", "_near", "_far")}

_NEEDLES: dict[str, dict[str, tuple[str, str | None]]] = {
    "loss": {
        "loss": ("one-shot", ""),
        "loss_served": ("served", "_served"),
        "loss_change": ("served minus one-shot", None),
    },
    "accuracy": {"accuracy": ("one-shot", None), "accuracy_served": ("served", None)},
}
"""Table -> number of a line -> way of scoring, and the ending of the gain that marks a cell."""

NeedleLine = Mapping[str, Any]
"""What one trial recorded of one length and depth; see `probes.needle_lines`."""

_FOUND_GAIN, _FOUND_ERRORS = 1.0, 2.0
"""A found needle lowers the loss at every seed by more nats per token than the first, beyond the
second in standard errors over rows. Less, such as of a token that is likelier because it occurred,
is no recall, however small its error."""


_RECALL_RATE, _MIN_PAIRS = 2.0, 4
"""How much more often than by guessing a model that recalls prefers the right value, of at least so
many."""


def report_recall(study: Study) -> list[doc.Content]:
    """Report the share of values that are recalled."""
    if "recall_acc" not in study.measured_metrics:
        return []
    pairs = {int(row.measurements.get("recall_pairs", 0)) for row in study.done_rows} - {0}
    found = [row.measurements for row in study.done_rows]
    rates = [one.get("recall_acc", 0.0) * one.get("recall_pairs", 0) for one in found]
    is_chance = min(pairs, default=0) >= _MIN_PAIRS and max(rates) < _RECALL_RATE
    best = max(one.get("recall_acc", 0.0) for one in found) if is_chance else None
    note = texts.write("recall", pairs=sorted(pairs), best=best)
    table = scored_table(study, "recall", "Values recalled (%)", _RECALL)
    return [doc.Heading("Associative recall"), note, table]


def report_needles(study: Study) -> list[doc.Content]:
    """Report the loss of the needle's answer and the share of its tokens on top."""
    lines = [line for row in study.done_rows for line in row.record.get("needle", ())]
    if not lines:
        return []
    places = [found for levels in study.cells for found in _places(study, levels).values()]
    found = [place for place in places if _is_found(place, "")]
    is_served = any("gain_served" in line for line in lines)
    shown = partial(fmt.format_fixed, digits=2)
    fields = {
        "rows": [f"{count:,}" for count in sorted({line["rows"] for line in lines})],
        "chance": fmt.format_ends((line["chance"] for line in lines), shown),
        "n_found": len(found),
        "n": len(places),
        "gain": fmt.format_fixed(max(line["gain"] for line in lines), 3),
        "n_lost": sum(_is_lost(one) for one in found) if is_served else None,
        "n_part": sum(not _is_lost(one) and not _is_found(one, "_served") for one in found),
    }
    note = texts.write("needles", **fields)
    depths = sorted({line["depth"] for line in lines})
    over = "standard deviation over seeds" if len(study.seeds) > 1 else "standard error over rows"
    caption = texts.fill(
        "needle table", sign=fmt.PLUS_MINUS, over=over, gain=_FOUND_GAIN, errors=_FOUND_ERRORS
    )
    losses = doc.make_table("needle", caption, _needle_rows(study, depths, "loss", "nats/token"))
    caption = "Answer tokens of the needle that are the likeliest (%);"
    caption += f" mean {fmt.PLUS_MINUS} {over}."
    rows = _needle_rows(study, depths, "accuracy", "%")
    accuracies = doc.make_table("needle-accuracy", caption, rows)
    return [doc.Heading("Needle in a haystack"), note, losses, accuracies]


def _places(study: Study, levels: Levels) -> dict[tuple[int, float], list[NeedleLine]]:
    """Return a cell's lines, one a seed, by length and depth."""
    places: dict[tuple[int, float], list[NeedleLine]] = {}
    for row in study.cells[levels].values():
        for line in row.record.get("needle", ()) if row.is_done else ():
            places.setdefault((line["length"], line["depth"]), []).append(line)
    return places


def _is_lost(lines: list[NeedleLine]) -> bool:
    """Return whether what is found one-shot is found at no seed when served."""
    return not any(_is_found([line], "_served") for line in lines)


def _is_found(lines: list[NeedleLine], ending: str) -> bool:
    """Return whether the answer is at least e times as likely as without the needle."""
    name = f"gain{ending}"
    return all(
        name in line and line[name] > _FOUND_GAIN + _FOUND_ERRORS * line.get(f"{name}_stderr", 0.0)
        for line in lines
    )


def _needle_rows(
    study: Study, depths: list[float], metric: str, unit: str
) -> Iterator[doc.KeyedRow]:
    """Yield a row for each cell, length and way of scoring: of the loss, or of the accuracy."""
    for levels in study.cells:
        places = _places(study, levels)
        lengths = sorted({length for length, _ in places})
        for length, (name, (scoring, mark)) in product(lengths, _NEEDLES[metric].items()):
            by_depth = {depth: places.get((length, depth), []) for depth in depths}
            cells = {depth: _needle_cell(by_depth[depth], name, mark) for depth in depths}
            if all(cell is doc.EMPTY_CELL for cell in cells.values()):
                continue
            entries: list[tuple[doc.Column | str, doc.Value]] = []
            entries += [("cell", study.label(levels)), ("length", length), ("scored", scoring)]
            if metric == "loss":
                lines = next(filter(None, by_depth.values()))  # the same at every depth
                absent = _needle_cell(lines, name.replace("loss", "loss_absent"))
                hint = "loss of the same answer without a needle"
                entries.append((_needle_column("absent", unit, hint), absent))
            for depth, cell in cells.items():
                title = f"depth {fmt.format_percent(depth, 0)}"
                entries.append((_needle_column(title, unit), cell))
            yield entries, study.cell_key(levels)


def _needle_column(title: str, unit: str, hint: str = "") -> doc.Column:
    return doc.Column(title, True, hint, (f"{title} ({unit})", f"{title} error ({unit})"))


def _needle_cell(lines: list[NeedleLine], name: str, ending: str | None = None) -> doc.Cell:
    """Return the mean of ``name`` over seeds, with its spread or at one seed its error.

    Args:
        lines: One a seed.
        name: Of a number in them.
        ending: Mark the cell if the needle is found one-shot, by whether it is found in the way of
            scoring with this ending.
    """
    values = [line[name] for line in lines if name in line]
    if not values:
        return doc.EMPTY_CELL
    scale, digits = (100.0, 1) if name.startswith("accuracy") else (1.0, 3)
    mean, spread = cols.mean_and_spread(values)
    if len(values) == 1:
        spread = lines[0].get(f"{name}_stderr")
    show = fmt.format_signed if name.endswith("change") else fmt.format_fixed
    text = show(scale * mean, digits)
    if spread is not None:
        text += f" {fmt.PLUS_MINUS} {fmt.format_fixed(scale * spread, digits)}"
    tone: doc.Tone = ""
    if ending is not None and _is_found(lines, ""):
        is_found = _is_found(lines, ending)
        word = "lost" if _is_lost(lines) else "at some seeds"
        tone, text = ("good", text) if is_found else ("bad", f"{text}, {word}")
    error = None if spread is None else scale * spread
    return doc.Cell(text, scale * mean, tone, csv=(scale * mean, error))
