"""The best setting of a recipe from losses at a few values of it.

Near its best, the loss is about quadratic in the logarithm of the learning rate. So a parabola
through the least of the values and its two neighbours gives the best between them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvlab.analysis.statistics import sum_squares

MAX_ADDED = 3
"""Values that may be added to a grid, where its best is at an edge or beside a divergence."""

DIGITS = 3
"""Significant digits of a value that is added or found."""

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

    def mean(self, seeds: Sequence[int]) -> float:
        return math.fsum(self.losses[seed] for seed in seeds) / len(seeds)


def read_points(entry: Mapping[str, Any]) -> tuple[TunedPoint, ...]:
    """Return the points of an architecture's entry in ``sweep.json``; see `write_point`."""
    return tuple(
        TunedPoint(
            point["value"],
            {
                int(seed): math.inf if loss is None else loss
                for seed, loss in point["losses"].items()
            },
        )
        for point in entry["points"]
    )


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
    seeds = _common_seeds(points)
    if not seeds or len(points) >= grid_size + MAX_ADDED:
        return None
    values, means = [point.value for point in points], [point.mean(seeds) for point in points]
    best, last = means.index(min(means)), len(values) - 1
    below, above = round_setting(values[0] ** 2 / values[1]), values[-1] ** 2 / values[-2]
    if best == 0:
        return below
    if best == last:
        return round_setting(above)
    if _find_vertex(points, seeds, best) is not None:
        return None
    if math.isinf(means[best + 1]):
        return below if best == 1 else _geometric_mean(values[best], values[best + 1])
    return (
        round_setting(above) if best == last - 1 else _geometric_mean(*values[best - 1 : best + 1])
    )


def find_optimum(points: Sequence[TunedPoint]) -> Optimum:
    """Return the best value by a parabola in its logarithm, or the best that was measured.

    Args:
        points: At rising values, three or more.
    """
    seeds = _common_seeds(points)
    if not seeds:
        return Optimum(None, flag="failed")
    means = [point.mean(seeds) for point in points]
    best = means.index(min(means))
    if math.isinf(means[best]):
        return Optimum(points[0].value, flag="diverged")
    if best in (0, len(points) - 1):
        return Optimum(points[best].value, means[best], flag="edge")
    optimum = _find_vertex(points, seeds, best)
    return optimum or Optimum(points[best].value, means[best], flag="beside divergence")


def _find_vertex(points: Sequence[TunedPoint], seeds: Sequence[int], best: int) -> Optimum | None:
    """Return the vertex of the parabola through the best value and its neighbours.

    If one neighbour diverged, the parabola goes through the next two values on the other side.
    None if its vertex is not between the best value and the next one there.
    """
    for start in (best - 1, best - 2, best):
        window = points[max(0, start) : start + 3]
        if start < 0 or len(window) < 3 or any(math.isinf(p.mean(seeds)) for p in window):
            continue
        optimum = _fit_vertex(window, seeds)
        low, high = points[max(start, best - 1)].value, points[min(start + 2, best + 1)].value
        if optimum is not None and optimum.value is not None and low <= optimum.value <= high:
            return optimum
    return None


def _fit_vertex(points: Sequence[TunedPoint], seeds: Sequence[int]) -> Optimum | None:
    """Return the vertex of the parabola through the mean losses at three values.

    None if the losses do not bend upwards.
    """
    middle = math.log(points[1].value)
    low, high = (math.log(points[n].value) - middle for n in (0, 2))
    curves = [_fit_parabola(low, high, [p.losses[seed] for p in points]) for seed in seeds]
    slope = math.fsum(one[0] for one in curves) / len(curves)
    curvature = math.fsum(one[1] for one in curves) / len(curves)
    if curvature <= 0:
        return None
    vertex = -slope / (2 * curvature)
    error = None
    if len(seeds) > 1:
        # the vertex is a ratio of two means over seeds: its error by the delta method
        residuals = [own + 2 * vertex * bend for own, bend in curves]
        variance = sum_squares(residuals) / (len(seeds) - 1) / len(seeds)
        error = math.sqrt(variance) / (2 * curvature)
    loss = points[1].mean(seeds) - slope**2 / (4 * curvature)
    return Optimum(round_setting(math.exp(middle + vertex)), loss, error)


def _fit_parabola(low: float, high: float, losses: Sequence[float]) -> tuple[float, float]:
    """Return slope and curvature at 0 of the parabola through losses at ``low``, 0 and ``high``."""
    left, right = (losses[0] - losses[1]) / low, (losses[2] - losses[1]) / high
    curvature = (right - left) / (high - low)
    return right - curvature * high, curvature


def _common_seeds(points: Sequence[TunedPoint]) -> list[int]:
    """Return the seeds that have a loss or a divergence at every value."""
    return sorted(set.intersection(*(set(point.losses) for point in points)))
