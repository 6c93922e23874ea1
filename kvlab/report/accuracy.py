"""HellaSwag accuracies of cells, with the error that a finite number of items leaves."""

from collections.abc import Iterable

from kvlab.report.rows import Levels
from kvlab.report.study import Study

CHANCE = 0.25
ERRORS = 2.0
"""Standard errors above chance from which an accuracy is taken to be above it."""


def item_error(study: Study, levels: Levels, metric: str) -> float | None:
    """Standard error over items of a cell's mean accuracy, as a share; None without items.

    Of one seed's items: seeds answer the same ones, so more seeds make it no smaller.
    """
    mean = study.mean(levels, metric)
    items = max(study.values(levels, "hellaswag_items").values(), default=0)
    if mean is None or items < 2:
        return None
    return float((max(0.0, mean * (1 - mean)) / (items - 1)) ** 0.5)


def largest_error(study: Study, metrics: Iterable[str]) -> float | None:
    """Of all cells in these metrics."""
    found = (item_error(study, levels, m) for m in metrics for levels in study.cells)
    return max((error for error in found if error is not None), default=None)


def all_at_chance(study: Study, metrics: Iterable[str]) -> bool:
    """Whether no cell's accuracy is above chance by more than `ERRORS` of its errors."""
    known = [
        mean <= CHANCE + ERRORS * (item_error(study, levels, metric) or 0.0)
        for metric in metrics
        for levels, mean in study.means(metric).items()
    ]
    return bool(known) and all(known)
