"""Levels whose trainings diverge more often than their paired baseline trainings.

The trials that are left of a level that diverges are its lucky ones, so their mean flatters it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvlab.analysis.matched_pairs import Cells, Corners
from kvlab.analysis.statistics import sign_flip_test
from kvlab.analysis.trial_rows import Levels


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
    seeds its p-value is never below 2**(1 - n). An interaction has a pair of trials on either side.

    Args:
        cells: The rows of every cell by seed.
        settings: The signed cells of each comparison.
    """
    level = partner = both = pairs = 0
    net: dict[int, float] = {}
    for corners in settings:
        for seed in cells[corners[0][1]]:
            states = [(sign, _status(cells, levels, seed)) for sign, levels in corners]
            above = any(state == "diverged" for sign, state in states if sign > 0)
            below = any(state == "diverged" for sign, state in states if sign < 0)
            pairs += all(state in ("done", "diverged") for _, state in states)
            level += above and not below
            partner += below and not above
            both += above and below
            net[seed] = net.get(seed, 0.0) + above - below
    if not level + partner + both:
        return None
    return Divergence(level, partner, both, pairs, sign_flip_test(list(net.values())))


def count_contrast_divergence(cells: Cells, weights: Mapping[Levels, float]) -> Divergence | None:
    """Count the trials that diverged on either side of a contrast, which has no pairs."""
    above = count_trials(cells, (levels for levels, weight in weights.items() if weight > 0))
    below = count_trials(cells, (levels for levels, weight in weights.items() if weight < 0))
    if not sum(above.values()) + sum(below.values()):
        return None
    seeds = above.keys() | below.keys()
    net = [float(above.get(seed, 0) - below.get(seed, 0)) for seed in sorted(seeds)]
    trials = sum(len(cells[levels]) for levels in weights)
    return Divergence(sum(above.values()), sum(below.values()), 0, trials, sign_flip_test(net))


def count_trials(cells: Cells, chosen: Iterable[Levels]) -> dict[int, int]:
    """Return the number of diverged trials of some cells at every seed."""
    counts: dict[int, int] = {}
    for levels in chosen:
        for seed, row in cells[levels].items():
            counts[seed] = counts.get(seed, 0) + (row.status == "diverged")
    return counts


def _status(cells: Cells, levels: Levels, seed: int) -> str:
    row = cells[levels].get(seed)
    return "missing" if row is None else row.status
