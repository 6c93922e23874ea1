"""Trainings that diverged, or went wrong without diverging.

The trials that are left of a level that diverges are its lucky ones, so their mean flatters it.

A training that *went wrong* is far worse than the others of its cell. It makes a mean and its
spread say little, and where one level alone has them, those that were seen say nothing of how often
they come. The rule is fixed beforehand: a training went wrong if its one-shot loss is above the
median of its cell by more than `MOST_DEVIATIONS` robust standard deviations. The deviation is
1.4826 times the median distance from the cell's median, over all trainings of the sweep; where a
cell has an odd number of seeds, its median itself is left out. A cell whose own median distance is
more than `OWN_SCALE` times as large has its own deviation: beside cells that answer everything
right, all trainings of others would be far off.

A sweep that a share decides has the share one-shot in place of the loss. There a training went
wrong only if it is off by more than the margin, too: of trainings that answer everything right,
losses near zero differ by factors that say nothing.
"""

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvlab.analysis.matched_pairs import Cells, Corners, name_trainings
from kvlab.analysis.statistics import sign_flip_test

MOST_DEVIATIONS = 6.0

MIN_SEEDS = 3
"""Seeds of a cell from which its median tells which training is far off."""

MIN_TRAININGS = 8
"""Distances from which their median is taken for a deviation."""

OWN_SCALE = 10.0
"""How many times the median distance of a cell is that of the sweep if it has its own scale."""

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over the median distance from its median."""


@dataclass(frozen=True)
class Divergence:
    """How often one side of a comparison diverged.

    Attributes:
        level: Pairs in which only the trial with the level diverged.
        partner: Pairs in which only its partner diverged.
        both: Pairs in which both diverged.
        pairs: Pairs in which each trial ended or diverged.
        p: Two-sided p-value that both sides diverge equally often; see `count_divergence`.
    """

    level: int
    partner: int
    both: int
    pairs: int
    p: float

    @property
    def is_one_sided(self) -> bool:
        """Whether any trial diverged where its partner did not."""
        return self.level + self.partner > 0


def count_divergence(cells: Cells, settings: Iterable[Corners]) -> Divergence | None:
    """Count the pairs that diverged; None if no trial did.

    McNemar's test for pairs that come in clusters: what shares a seed shares its batches, so the
    seed is the unit, and the sign of each seed's net count is flipped (`sign_flip_test`). With n
    seeds its p-value is never below 2**(1 - n). An interaction has two trials on either side and a
    contrast many, of which those that one side has more count.
    """
    level = partner = both = pairs = 0
    net: Counter[int] = Counter()
    for corners in settings:
        for seed in cells[corners[0][1]]:
            rows = [(sign, cells[levels].get(seed)) for sign, levels in corners]
            states = [(sign, row.status if row is not None else "missing") for sign, row in rows]
            above = sum(state == "diverged" for sign, state in states if sign > 0)
            below = sum(state == "diverged" for sign, state in states if sign < 0)
            pairs += all(state in ("done", "diverged") for _, state in states)
            level += max(0, above - below)
            partner += max(0, below - above)
            both += min(above, below)
            net[seed] += above - below
    if not level + partner + both:
        return None
    return Divergence(level, partner, both, pairs, sign_flip_test(net.values()))


def find_wrong_trainings(
    cells: Cells, share: str | None = None, margin: float = 0.0
) -> dict[str, float]:
    """Return the trainings that went wrong, by id, with their distance in robust deviations.

    Cells that share a training count once.

    Args:
        share: The share that is compared in place of the loss, of which more is better.
        margin: Of the share, what a training may be off without being wrong.
    """
    metric, sign = (share, -1) if share else ("loss", 1)
    names = name_trainings(cells)
    losses: dict[tuple[str, ...], dict[str, float]] = {}
    for levels, by_seed in cells.items():
        for row in by_seed.values():
            if row.is_done and row.training and metric in row.measurements:
                loss = sign * row.measurements[metric]
                losses.setdefault(names[levels], {})[row.training] = loss
    distances: dict[str, tuple[float, float]] = {}
    sizes: list[float] = []
    for of_cell in losses.values():
        if len(of_cell) >= MIN_SEEDS:
            middle = statistics.median(of_cell.values())
            own = {training: loss - middle for training, loss in of_cell.items()}
            of_own = sorted(map(abs, own.values()))
            distances |= {name: (one, statistics.median(of_own)) for name, one in own.items()}
            sizes += of_own[len(own) % 2 :]
    of_all = statistics.median(sizes) if len(sizes) >= MIN_TRAININGS else 0.0
    least = margin / MOST_DEVIATIONS if share else 0.0
    if not of_all and not least:
        return {}
    deviations = {
        training: distance
        / max(_NORMAL * (of_cell if of_cell > OWN_SCALE * of_all else of_all), least)
        for training, (distance, of_cell) in distances.items()
    }
    return {name: number for name, number in deviations.items() if number > MOST_DEVIATIONS}
