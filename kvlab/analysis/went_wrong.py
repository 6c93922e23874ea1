"""Trainings that went wrong without diverging: far worse than the others of their cell.

Such a training makes a mean and its spread say little, and where one level alone has them, those
that were seen say nothing of how often they come. The rule is fixed beforehand: a training went
wrong if its one-shot loss is above the median of its cell by more than `MOST_DEVIATIONS` robust
standard deviations. The deviation is 1.4826 times the median distance from the cell's median, over
all trainings of the sweep; where a cell has an odd number of seeds, its median itself is left out.
"""

import statistics

from kvlab.analysis.matched_pairs import Cells, name_trainings

MOST_DEVIATIONS = 6.0

MIN_SEEDS = 3
"""Seeds of a cell from which its median tells which training is far off."""

MIN_TRAININGS = 8
"""Distances from which their median is taken for a deviation."""

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over the median distance from its median."""


def find_wrong_trainings(cells: Cells, metric: str = "loss") -> dict[str, float]:
    """Return the trainings that went wrong, by id, with their distance in robust deviations.

    Args:
        cells: The rows of every cell by seed.
        metric: The loss that trainings are compared in; cells that share a training count once.
    """
    names = name_trainings(cells)
    losses: dict[tuple[str, ...], dict[str, float]] = {}
    for levels, by_seed in cells.items():
        for row in by_seed.values():
            if row.is_done and row.training and metric in row.measurements:
                losses.setdefault(names[levels], {})[row.training] = row.measurements[metric]
    distances: dict[str, float] = {}
    sizes: list[float] = []
    for of_cell in losses.values():
        if len(of_cell) >= MIN_SEEDS:
            middle = statistics.median(of_cell.values())
            own = {training: loss - middle for training, loss in of_cell.items()}
            distances |= own
            sizes += sorted(map(abs, own.values()))[len(own) % 2 :]
    deviation = _NORMAL * statistics.median(sizes) if len(sizes) >= MIN_TRAININGS else 0.0
    if not deviation:
        return {}
    return {
        training: distance / deviation
        for training, distance in distances.items()
        if distance > MOST_DEVIATIONS * deviation
    }
