"""Settings that were tuned for each architecture before the cells were compared."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.tuning import (
    REASONS,
    Optimum,
    TunedPoint,
    polish_losses,
    predict_loss,
    read_points,
)
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Bullets,
    Cell,
    Code,
    Column,
    Figure,
    Paragraph,
    Row,
    Section,
    Span,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.figures.plot import SERIES, Axis, Line, Plot, Point, Points
from kvlab.report.formatting import PLUS_MINUS, format_difference, format_metric
from kvlab.report.table_columns import mean_and_spread

MAX_DRAWN = len(SERIES)


def report_tuned_settings(study: Study) -> Section | None:
    """List the rates of every architecture, and draw the losses that they follow from."""
    tuning = study.sweep.get("tuning")
    if not tuning:
        return None
    entries = tuning["architectures"]
    contents: list[Paragraph | Bullets | Table | Figure] = [_introduce(tuning)]
    notes = tuple(_notes(study, tuning))
    contents += [Bullets(notes)] if notes else []
    contents.append(_rate_table(study, tuning))
    if any(point.losses for entry in entries for point in read_points(entry)):
        contents += [_loss_table(study, entries), *_draw_losses(study, entries, tuning["key"])]
    return Section("Tuned settings", tuple(contents), is_appendix=True)


def _introduce(tuning: Mapping[str, Any]) -> Paragraph:
    grid = ", ".join(f"{value:g}" for value in tuning["grid"])
    seeds = ", ".join(map(str, tuning["seeds"]))
    n_architectures = format_count(len(tuning["architectures"]), "architecture")
    tokens = f" on {tuning['tokens']:,} tokens" if tuning["tokens"] else ""
    return paragraph(
        "Before the cells were compared, ",
        Code(tuning["key"]),
        f" was tuned for each of {n_architectures}: the cells that differ in training. Each was"
        f" trained{tokens} at {grid}, and at up to three more values where the best was at an edge"
        f" or beside a divergence, at {format_count(len(tuning['seeds']), 'seed')} ({seeds}) that"
        " no comparison uses. The best is the vertex of the parabola, in the logarithm, through the"
        " one-shot validation losses of the least and its two neighbours, rounded to three digits."
        " The loss at a value is the median over seeds, less what all values share at a seed (the"
        " mean at one or two seeds); a value at which any training diverged is not used. The text"
        " of these losses is that of the effects, whose intervals hold at the values found.",
    )


def _notes(study: Study, tuning: Mapping[str, Any]) -> Iterator[tuple[Span, ...]]:
    if not tuning["is_over"]:
        yield (Strong("The tuning is not over:"), " the cells have no trials yet.")
        return
    if tuning["tokens"]:
        yield (
            Strong(f"Tuned on fewer tokens ({tuning['tokens']:,}) than the cells:"),
            " the best learning rate of a longer training is often lower.",
        )
    if (count := len(tuning["seeds"])) < 3:
        yield (
            Strong(f"Tuned at {format_count(count, 'seed')}:"),
            " one training that goes wrong can move such a value.",
        )
    for entry in tuning["architectures"]:
        optimum = Optimum(**entry["optimum"])
        if optimum.flag:
            yield (
                Code(_label(study, entry)),
                f" has {REASONS[optimum.flag]}: it may do better elsewhere.",
            )


def _label(study: Study, entry: Mapping[str, Any]) -> str:
    return study.label(_levels(study, entry))


def _levels(study: Study, entry: Mapping[str, Any]) -> Levels:
    return tuple(entry["levels"][factor] for factor in study.factors)


def _rate_table(study: Study, tuning: Mapping[str, Any]) -> Table:
    entries, grid = tuning["architectures"], tuning["grid"]
    step = (grid[-1] / grid[0]) ** (1 / (len(grid) - 1))
    columns = (
        Column("architecture", hint="the cell that was tuned"),
        Column("cells", True, "that take this value"),
        Column("recipe", True, "the value of the experiment"),
        Column("tuned", True),
        Column("error (%)", True, "standard error of the tuned value over seeds"),
        Column("loss (nats/token)", True, "at the vertex; where there is none, the least measured"),
        Column(
            "a step lower (nats/token)",
            True,
            f"change of the loss at {1 / step:.2g} of the value, by the parabola through the three"
            " values nearest to it; empty where nothing was tried",
        ),
        Column("a step higher (nats/token)", True, f"the same at {step:.2g} times the value"),
        Column("why"),
    )
    rows = []
    for entry in entries:
        optimum = Optimum(**entry["optimum"]) if entry["optimum"] else Optimum(None)
        error = EMPTY_CELL
        if optimum.log_error is not None:
            error = cell(f"{100 * optimum.log_error:.1f}", 100 * optimum.log_error)
        value, loss = optimum.value, optimum.loss
        cells = (
            cell(_label(study, entry)),
            cell(str(len(entry["cells"])), len(entry["cells"])),
            cell(f"{entry['recipe']:g}", entry["recipe"]),
            EMPTY_CELL if value is None else cell(f"{value:g}", value),
            error,
            EMPTY_CELL if loss is None else cell(format_metric("loss", loss), loss),
            _change_cell(entry, optimum, 1 / step),
            _change_cell(entry, optimum, step),
            cell(REASONS[optimum.flag] or ("vertex" if entry["optimum"] else "not over")),
        )
        rows.append(Row(cells, study.cell_key(_levels(study, entry))))
    return Table("tuned", "What was found for each architecture.", columns, tuple(rows))


def _change_cell(entry: Mapping[str, Any], optimum: Optimum, ratio: float) -> Cell:
    """Return what the loss would change at a multiple of the value that was found."""
    if optimum.value is None or optimum.loss is None:
        return EMPTY_CELL
    loss = predict_loss(read_points(entry), optimum.value * ratio)
    if loss is None:
        return EMPTY_CELL
    if math.isinf(loss):
        return Cell("diverged", None, "bad")
    return cell(format_difference("loss", loss - optimum.loss), loss - optimum.loss)


def _loss_table(study: Study, entries: list[dict[str, Any]]) -> Table:
    columns = (
        Column("architecture"),
        Column("value", True),
        Column("seeds", True, "of trials that have ended, diverged ones included"),
        Column(
            "loss (nats/token)",
            True,
            "one-shot: median over seeds as above, with the standard deviation over seeds",
            ("loss (nats/token)", "loss sd (nats/token)"),
        ),
    )
    rows = [
        Row(
            (
                cell(_label(study, entry)),
                cell(f"{point.value:g}", point.value),
                cell(str(len(point.losses)), len(point.losses)),
                _loss_cell(point, typical),
            ),
            study.cell_key(_levels(study, entry)),
        )
        for entry in entries
        for point, typical in _typical_losses(entry)
    ]
    return Table("tuned-losses", "Losses while tuning.", columns, tuple(rows))


def _typical_losses(entry: Mapping[str, Any]) -> list[tuple[TunedPoint, float]]:
    """Return the points with their typical losses; infinite where there is none."""
    points = read_points(entry)
    return list(zip(points, polish_losses(points) or [math.inf] * len(points), strict=True))


def _loss_cell(point: TunedPoint, typical: float) -> Cell:
    losses = list(point.losses.values())
    if diverged := sum(map(math.isinf, losses)):
        some = "" if diverged == len(losses) else f" at {diverged} of {len(losses)}"
        return Cell(f"diverged{some}", None, "bad", csv=(None, None))
    if math.isinf(typical):
        return Cell(EMPTY_CELL.text, None, "muted", csv=(None, None))
    text, (_, spread) = format_metric("loss", typical), mean_and_spread(losses)
    if spread is not None:
        text += f" {PLUS_MINUS} {format_metric('loss', spread)}"
    return Cell(text, typical, csv=(typical, spread))


def _draw_losses(study: Study, entries: list[dict[str, Any]], key: str) -> Iterator[Figure]:
    """Yield the figure of losses against the tuned value, the best of each marked."""
    layers: list[Points | Line] = []
    for number, entry in enumerate(entries[:MAX_DRAWN]):
        layers += _draw_architecture(study, entry, number)
    if not layers:
        return
    caption = f"Validation loss against {key} while tuning; a diamond marks the best."
    if len(entries) > MAX_DRAWN:
        caption += f" The first {MAX_DRAWN} of {len(entries)} architectures."
    found = "; ".join(
        f"{_label(study, entry)} {entry['optimum']['value']:g}"
        for entry in entries[:MAX_DRAWN]
        if entry["optimum"] and entry["optimum"]["value"]
    )
    plot = Plot(Axis(key, "log"), Axis("validation loss (nats/token)"), tuple(layers))
    yield Figure("tuned", caption, f"{caption} {found or 'The tuning is not over'}.", plot)


def _draw_architecture(
    study: Study, entry: Mapping[str, Any], number: int
) -> Iterator[Points | Line]:
    """Yield a line through the typical losses that are finite, and a mark at the best."""
    label, key = _label(study, entry), study.cell_key(_levels(study, entry))
    points = []
    for point, loss in _typical_losses(entry):
        if math.isfinite(loss):
            tip = (label, f"{point.value:g}", f"loss {format_metric('loss', loss)}")
            points.append(Point(point.value, loss, tip, key))
    if points:
        yield Line(label, tuple(points), SERIES[number], dashed=number % 2 == 1)
    optimum = entry["optimum"]
    if points and optimum and optimum["value"] and optimum["loss"] is not None:
        tip = (
            label,
            f"best {optimum['value']:g}",
            f"loss {format_metric('loss', optimum['loss'])}",
        )
        mark = Point(optimum["value"], optimum["loss"], tip, key)
        yield Points(f"{label}, best", (mark,), SERIES[number], "diamond")
