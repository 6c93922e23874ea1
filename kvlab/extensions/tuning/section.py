"""What was tuned for each architecture, and the losses that it follows from."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab.analysis.study import Study
from kvlab.extensions.tuning import optimum as opt
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts


class _Tuned:
    """An architecture of ``tuning`` in ``sweep.json``, with the typical loss at each of its points.

    A typical loss is infinite where there is none.
    """

    def __init__(self, study: Study, entry: Mapping[str, Any]):
        levels = tuple(entry["levels"][factor] for factor in study.factors)
        self.label, self.key, self.entry = study.label(levels), study.cell_key(levels), entry
        self.points = opt.read_points(entry)
        self.typical = opt.polish_losses(self.points) or [math.inf] * len(self.points)
        self.optimum = opt.Optimum(**entry["optimum"]) if entry["optimum"] else opt.Optimum(None)

    def mark(self, value: float, loss: float) -> doc.Point:
        tip = (self.label, f"{value:g}", f"loss {fmt.format_metric('loss', loss)}")
        return doc.Point(value, loss, tip, self.key)


def describe_recipe(study: Study) -> tuple[doc.Span, ...] | None:
    """Return what the design says of the rates; None if none was tuned."""
    tuning = study.sweep.get("tuning") or {}
    optima = [entry["optimum"] or {} for entry in tuning.get("architectures", ())]
    values = [one["value"] for one in optima if one.get("value")]
    n_flagged = sum(bool(one.get("flag")) for one in optima)
    fields = {"n": len(optima), "key": tuning.get("key"), "n_flagged": n_flagged}
    return texts.spans("tuned recipe", values=values, **fields) if optima else None


def report_tuning(study: Study) -> doc.Section | None:
    """List the rates of every architecture, and draw the losses that they follow from."""
    tuning = study.sweep.get("tuning")
    if not tuning:
        return None
    contents: list[doc.Content] = [texts.write("tuning", tuning=tuning)]
    found = [_Tuned(study, entry) for entry in tuning["architectures"]]
    if warnings := tuple(_warn_of_tuning(tuning, found)):
        contents.append(doc.Bullets(warnings))
    rows = [(_rate_entries(one, tuning["grid"]), one.key) for one in found]
    contents.append(doc.make_table("tuned", "What was found for each architecture.", rows))
    if any(point.losses for one in found for point in one.points):
        rows = [
            (_loss_entries(one, point, typical), one.key)
            for one in found
            for point, typical in zip(one.points, one.typical, strict=True)
        ]
        contents.append(doc.make_table("tuned-losses", "Losses while tuning.", rows))
        contents += _draw_losses(found, tuning["key"])
    return doc.Section("Tuned settings", tuple(contents), is_appendix=True)


def _warn_of_tuning(
    tuning: Mapping[str, Any], found: Sequence[_Tuned]
) -> Iterator[tuple[doc.Span, ...]]:
    if not tuning["is_over"]:
        yield (doc.Strong("The tuning is not over:"), " the cells have no trials yet.")
        return
    if tuning["tokens"]:
        yield texts.spans("tuned on fewer tokens", tokens=tuning["tokens"])
    if len(tuning["seeds"]) < 3:
        yield texts.spans("tuned at few seeds", n=len(tuning["seeds"]))
    for one in found:
        if reason := opt.REASONS[one.optimum.flag]:
            yield doc.Code(one.label), f" has {reason}: it may do better elsewhere."


def _rate_entries(one: _Tuned, grid: Sequence[float]) -> doc.Entries:
    step = (grid[-1] / grid[0]) ** (1 / (len(grid) - 1))
    entry, optimum = one.entry, one.optimum
    yield "architecture", doc.cell(one.label), "the cell that was tuned"
    yield "cells", len(entry["cells"]), "that take this value"
    yield "recipe", doc.cell(f"{entry['recipe']:g}", entry["recipe"]), "the value of the experiment"
    yield "tuned", cols.number_cell(optimum.value, "{:g}".format)
    error = None if optimum.log_error is None else 100 * optimum.log_error
    hint = "standard error of the tuned value over seeds"
    yield "error (%)", cols.number_cell(error, "{:.1f}".format), hint
    loss = cols.number_cell(optimum.loss, lambda loss: fmt.format_metric("loss", loss))
    yield "loss (nats/token)", loss, "at the vertex; where there is none, the least measured"
    for side, ratio in (("lower", 1 / step), ("higher", step)):
        hint = (
            f"change of the loss at {ratio:.2g} times the value, by the parabola through the three"
            " values nearest to it; empty where nothing was tried"
        )
        change = doc.EMPTY_CELL
        if optimum.value is not None and optimum.loss is not None:
            predicted = opt.predict_loss(one.points, optimum.value * ratio)
            if predicted is not None and math.isinf(predicted):
                change = doc.Cell("diverged", None, "bad")
            elif predicted is not None:
                change = cols.difference_cell("loss", predicted - optimum.loss)
        yield doc.Column(f"a step {side} (nats/token)", True, hint), change
    reason = opt.REASONS[optimum.flag] or ("vertex" if entry["optimum"] else "not over")
    yield "why", reason


def _loss_entries(one: _Tuned, point: opt.TunedPoint, typical: float) -> doc.Entries:
    losses = list(point.losses.values())
    yield "architecture", one.label
    yield "value", doc.cell(f"{point.value:g}", point.value)
    yield "seeds", len(losses), "of trials that have ended, diverged ones included"
    if diverged := sum(map(math.isinf, losses)):
        some = "" if diverged == len(losses) else f" at {diverged} of {len(losses)}"
        loss = doc.Cell(f"diverged{some}", None, "bad", csv=(None, None))
    elif math.isinf(typical):
        loss = doc.EMPTY_CELL
    else:
        loss = cols.error_cell("loss", typical, cols.mean_and_spread(losses)[1])
    hint = "one-shot: median over seeds as above, with the standard deviation over seeds"
    yield cols.mean_column("loss (nats/token)", hint=hint), loss


def _draw_losses(found: Sequence[_Tuned], key: str) -> Iterator[doc.Figure]:
    """Yield the figure of losses against the tuned value, the best of each marked."""
    layers: list[doc.Points | doc.Line] = []
    values = []
    for number, one in enumerate(found[: len(doc.SERIES)]):
        pairs = zip(one.points, one.typical, strict=True)
        points = [one.mark(at.value, loss) for at, loss in pairs if math.isfinite(loss)]
        if points:
            layers.append(doc.draw_series(number, one.label, points))
        if one.optimum.value:
            values.append(f"{one.label} {one.optimum.value:g}")
            if points and one.optimum.loss is not None:
                mark = one.mark(one.optimum.value, one.optimum.loss)
                layers.append(doc.Points("", (mark,), doc.SERIES[number], "diamond"))
    if layers:
        caption = texts.fill("caption of tuning", key=key, n=len(found), most=len(doc.SERIES))
        axes = doc.Axis(key, "log"), doc.Axis("validation loss (nats/token)")
        alt = f"{caption} {'; '.join(values) or 'The tuning is not over'}."
        yield doc.Figure("tuned", caption, alt, doc.Plot(*axes, tuple(layers)))
