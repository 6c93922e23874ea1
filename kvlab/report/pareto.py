"""Memory against quality: which cells no other cell beats, and which is best in a budget."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.report.numbers import mebibytes, megabytes
from kvlab.report.rows import Levels
from kvlab.report.study import Study
from kvlab.trial.metrics import METRICS


@dataclass(frozen=True)
class CellPoint:
    """One cell by its KV bytes and its mean quality. ``front``: no cell is better in one and as
    good in the other."""

    levels: Levels
    stored: int
    mean: float
    front: bool


@dataclass(frozen=True)
class BudgetBest:
    """The best cell of those that fit a budget; ``second`` is the next best, if any."""

    condition: str
    budget: int
    fitting: int
    point: CellPoint
    second: CellPoint | None


def points(study: Study) -> list[CellPoint]:
    """Every cell with bytes and quality, the smallest first, the front marked."""
    return mark_front(study, study.primary)


def mark_front(study: Study, metric: str) -> list[CellPoint]:
    """As `points`, for any metric with a better direction."""
    sign = -1.0 if METRICS[metric].better == "higher" else 1.0
    sized = ((levels, study.kv_bytes(levels), mean) for levels, mean in study.means(metric).items())
    known = [(levels, size, mean) for levels, size, mean in sized if size is not None]
    known.sort(key=lambda one: (one[1], sign * one[2], study.key(one[0])))
    found: list[CellPoint] = []
    best, best_size = float("inf"), -1
    for levels, size, mean in known:
        # A tie in both is on the front twice: neither beats the other.
        front = sign * mean < best or (sign * mean == best and size == best_size)
        if front:
            best, best_size = sign * mean, size
        found.append(CellPoint(levels, size, mean, front))
    return found


def budget_bests(study: Study) -> Iterator[BudgetBest]:
    """The best cell within a half, a quarter, ... of the baseline's bytes, while any fits."""
    base = study.kv_bytes(study.baseline)
    known = points(study)
    if base is None or not known:
        return
    sign = -1.0 if METRICS[study.primary].better == "higher" else 1.0
    ranked = sorted(known, key=lambda point: (sign * point.mean, point.stored))
    share = 2
    while base // share >= known[0].stored:
        fitting = [point for point in ranked if point.stored <= base // share]
        condition = f"within 1/{share} of the baseline's bytes ({_size(base // share)})"
        second = fitting[1] if len(fitting) > 1 else None
        yield BudgetBest(condition, base // share, len(fitting), fitting[0], second)
        share *= 2


def _size(count: int) -> str:
    return f"{megabytes(count)} MB = {mebibytes(count)} MiB"
