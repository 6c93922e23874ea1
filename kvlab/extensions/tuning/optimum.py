"""The best setting of a recipe from losses at a few values of it.

Near its best, the loss is about quadratic in the logarithm of the learning rate. So a parabola
through the least of the values and its two neighbours gives the best between them. The loss at a
value is a median over seeds (`polish_losses`), which one training that went wrong hardly moves.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from kvlab.analysis.statistics import sum_squares

MAX_ADDED = 3
"""Values that may be added to a grid, where its best is at an edge or beside a divergence."""

DIGITS = 3
"""Significant digits of a value that is added or found."""

POLISHES = 10
"""Passes over seeds and values in which `polish_losses` takes medians away; it ends in a few."""

MEDIAN_ERRORS = {2: 1.0, 3: 1.16, 4: 1.09, 5: 1.20, 6: 1.13, 7: 1.21, 8: 1.16}
"""Seeds -> standard error of a median over that of the mean, of normal losses; above 8, 1.25."""

Flag = Literal["", "edge", "beside divergence", "diverged", "failed"]


@dataclass(frozen=True)
class TunedPoint:
    """The losses at one value.

    Attributes:
        value: Of the setting, such as a learning rate.
        losses: Validation loss by seed, in nats per token; infinite if the training diverged.
            A seed whose trial failed is not in it.
    """

    value: float
    losses: Mapping[int, float] = field(default_factory=dict)


def read_points(entry: Mapping[str, Any]) -> tuple[TunedPoint, ...]:
    """Return the points of an architecture's entry in ``sweep.json``; see `write_point`."""

    def read(losses: Mapping[str, float | None]) -> dict[int, float]:
        return {int(seed): math.inf if one is None else one for seed, one in losses.items()}

    return tuple(TunedPoint(point["value"], read(point["losses"])) for point in entry["points"])


def write_point(point: TunedPoint) -> dict[str, Any]:
    """Return a point as JSON, in which a divergence is null."""
    losses = {str(seed): None if math.isinf(loss) else loss for seed, loss in point.losses.items()}
    return {"value": point.value, "losses": losses}


@dataclass(frozen=True)
class Optimum:
    """The best value that was found.

    Attributes:
        value: Rounded to three digits; None if there is none.
        loss: Of the parabola at its vertex, or the least measured one.
        log_error: Standard error of the natural logarithm of the value over seeds, by the delta
            method; None at one seed or without a parabola.
        flag: Why the value is not a vertex: ``edge``, the loss still falls at the edge of the
            grid; ``beside divergence``, the next higher or lower value diverged; ``diverged``, all
            did; ``failed``, no seed has a loss or a divergence at every value.
    """

    value: float | None
    loss: float | None = None
    log_error: float | None = None
    flag: Flag = ""


REASONS: dict[Flag, str] = {
    "": "",
    "edge": "the least measured, at the edge of what was tried",
    "beside divergence": "the least measured, beside a divergence",
    "diverged": "the lowest that was tried, as all diverged",
    "failed": "that of the recipe, as tuning trials failed",
}
"""Flag -> what a value is that is not a vertex."""


def describe_optimum(optimum: Optimum, recipe: float) -> str:
    """Return the value with its error, and why it is not a vertex if it is none.

    Args:
        recipe: The value that is used if none was found.
    """
    text = f"{optimum.value or recipe:g}"
    if optimum.log_error is not None:
        text += f" \N{PLUS-MINUS SIGN} {optimum.log_error:.0%}"
    return text + (f" ({REASONS[optimum.flag]})" if optimum.flag else "")


def round_setting(value: float) -> float:
    """Round a value to three significant digits."""
    return float(f"{value:.{DIGITS}g}")


def _geometric_mean(one: float, other: float) -> float:
    return round_setting(math.sqrt(one * other))


def propose_value(points: Sequence[TunedPoint], grid_size: int) -> float | None:
    """Return the value to try next, or None if the best can be found, or not at all.

    A best at the edge of the grid is followed by one more step of the grid's own ratio. Beside a
    best whose neighbour diverged, the parabola needs two values on the other side, which may be
    one more such step. If its vertex is not there, the geometric mean of the two follows.

    Args:
        points: At rising values.
        grid_size: Number of values that were asked for; at most three are added.
    """
    values, losses = [point.value for point in points], polish_losses(points)
    if not losses or len(points) >= grid_size + MAX_ADDED:
        return None
    best, last = losses.index(min(losses)), len(values) - 1
    below, above = round_setting(values[0] ** 2 / values[1]), values[-1] ** 2 / values[-2]
    if best == 0:
        return below
    if best == last:
        return round_setting(above)
    if _find_vertex(points, losses) is not None:
        return None
    if math.isinf(losses[best + 1]):
        return below if best == 1 else _geometric_mean(values[best], values[best + 1])
    return (
        round_setting(above) if best == last - 1 else _geometric_mean(*values[best - 1 : best + 1])
    )


def find_optimum(points: Sequence[TunedPoint]) -> Optimum:
    """Return the best value by a parabola in its logarithm, or the best that was measured.

    Args:
        points: At rising values, three or more.
    """
    losses = polish_losses(points)
    if not losses:
        return Optimum(None, flag="failed")
    best = losses.index(min(losses))
    if math.isinf(losses[best]):
        return Optimum(points[0].value, flag="diverged")
    if best in (0, len(points) - 1):
        return Optimum(points[best].value, losses[best], flag="edge")
    optimum = _find_vertex(points, losses)
    return optimum or Optimum(points[best].value, losses[best], flag="beside divergence")


def polish_losses(points: Sequence[TunedPoint]) -> list[float]:
    """Return the typical loss at each value: the median over seeds, less what a seed shares.

    What all values have in common at a seed and what all seeds have in common at a value are found
    by Tukey's median polish. Of three seeds, one training that went wrong hardly moves it. At one
    and at two seeds it is the mean.

    A value at which any training diverged is unsafe, and its loss infinite: a rate at which one of
    three trainings diverges would lose a third of a cell's trainings.

    Returns:
        A loss for each point; none without a seed that has a loss or a divergence at every value.
    """
    seeds = _common_seeds(points)
    if not seeds:
        return []
    table = [[point.losses[seed] for seed in seeds] for point in points]
    safe = [row for row in table if not any(map(math.isinf, row))]
    by_value, by_seed = [0.0] * len(safe), [0.0] * len(seeds)
    for _ in range(POLISHES if safe else 0):
        for n, column in enumerate(zip(*safe, strict=True)):
            shift = median(column)
            by_seed[n] += shift
            for row in safe:
                row[n] -= shift
        for n, row in enumerate(safe):
            shift = median(row)
            by_value[n] += shift
            row[:] = [loss - shift for loss in row]
    typical = iter(median(by_seed) + value for value in by_value)
    return [math.inf if any(map(math.isinf, row)) else next(typical) for row in table]


def predict_loss(points: Sequence[TunedPoint], value: float) -> float | None:
    """Return the loss at any value, by the parabola through the three safe values nearest to it.

    Infinite if the nearest value of all is unsafe. None where nothing was tried: more than half a
    step beyond the lowest or the highest value, or at fewer than three safe ones.
    """
    losses = polish_losses(points)
    places = [math.log(point.value / value) for point in points]
    is_tried = 3 * places[0] <= places[1] and 3 * places[-1] >= places[-2]  # within half a step
    nearest = sorted(range(len(losses)), key=lambda n: abs(places[n]))
    if nearest and math.isinf(losses[nearest[0]]):
        return math.inf
    window = sorted([n for n in nearest if math.isfinite(losses[n])][:3])
    if len(window) < 3 or not is_tried:
        return None
    middle = places[window[1]]
    low, high = (places[n] - middle for n in (window[0], window[2]))
    slope, curvature = _fit_parabola(low, high, [losses[n] for n in window])
    return losses[window[1]] - slope * middle + curvature * middle**2


def _find_vertex(points: Sequence[TunedPoint], losses: Sequence[float]) -> Optimum | None:
    """Return the vertex of the parabola through the best value and its neighbours.

    If one neighbour diverged, the parabola goes through the next two values on the other side.
    None if its vertex is not between the best value and the next one there.
    """
    best = losses.index(min(losses))
    for start in (best - 1, best - 2, best):
        window = slice(start, start + 3)
        if start < 0 or len(points[window]) < 3 or any(map(math.isinf, losses[window])):
            continue
        optimum = _fit_vertex(points[window], losses[window], _common_seeds(points))
        low, high = points[max(start, best - 1)].value, points[min(start + 2, best + 1)].value
        if optimum is not None and optimum.value is not None and low <= optimum.value <= high:
            return optimum
    return None


def _fit_vertex(
    points: Sequence[TunedPoint], losses: Sequence[float], seeds: Sequence[int]
) -> Optimum | None:
    """Return the vertex of the parabola through the typical losses at three values.

    None if the losses do not bend upwards.
    """
    middle = math.log(points[1].value)
    low, high = (math.log(points[n].value) - middle for n in (0, 2))
    slope, curvature = _fit_parabola(low, high, losses)
    if curvature <= 0:
        return None
    vertex = -slope / (2 * curvature)
    error = None
    if len(seeds) > 1:
        # the slope at the vertex, seed by seed: its spread gives the error by the delta method
        curves = [_fit_parabola(low, high, [p.losses[seed] for p in points]) for seed in seeds]
        residuals = [own + 2 * vertex * bend for own, bend in curves]
        variance = sum_squares(residuals) / (len(seeds) - 1) / len(seeds)
        error = MEDIAN_ERRORS.get(len(seeds), 1.25) * math.sqrt(variance) / (2 * curvature)
    loss = losses[1] - slope**2 / (4 * curvature)
    return Optimum(round_setting(math.exp(middle + vertex)), loss, error)


def _fit_parabola(low: float, high: float, losses: Sequence[float]) -> tuple[float, float]:
    """Return slope and curvature at 0 of the parabola through losses at ``low``, 0 and ``high``."""
    left, right = (losses[0] - losses[1]) / low, (losses[2] - losses[1]) / high
    curvature = (right - left) / (high - low)
    return right - curvature * high, curvature


def _common_seeds(points: Sequence[TunedPoint]) -> list[int]:
    """Return the seeds that have a loss or a divergence at every value."""
    return sorted(set.intersection(*(set(point.losses) for point in points)))
