"""Sign-flip tests of what is not normal: serving gaps, and trainings that diverge.

A serving gap is measured on one training's weights, so the training is the unit. Gaps are skewed:
most caches lose a little or a lot and never gain. A t-test assumes otherwise. The sign-flip test
assumes only that without an effect a gap is as likely as its negative (Fisher 1935). The signs of a
seed are flipped in all cells at once, and the largest studentized gap of all cells is compared with
that of every pattern (Westfall and Young 1993), so a p-value holds for a cell that was picked.

Levels whose trainings diverge more often than their paired baseline trainings are told too. The
trials that are left of a level that diverges are its lucky ones, so their mean flatters it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.analysis.matched_pairs import Cells, Corners
from kvlab.analysis.statistics import MAX_EXACT_FLIPS, sign_flip_test
from kvlab.analysis.trial_rows import Levels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_RANDOM_FLIPS = 100_000
_BLOCK = 4000


@dataclass(frozen=True)
class ServingGap:
    """A cell's serving gap over its trainings.

    Attributes:
        value: The mean, in nats per token.
        smallest: The smallest gap of a training.
        largest: The largest one.
        trainings: Number of trainings.
        p: Two-sided p-value, corrected for all cells; 1 if every gap is zero.
        own_p: The same for this cell alone.
        alpha: Probability of any false claim.
    """

    value: float
    smallest: float
    largest: float
    trainings: int
    p: float
    own_p: float
    alpha: float

    @property
    def is_suggestive(self) -> bool:
        """Whether the test of this cell alone passes, and that of all cells together does not."""
        return self.can_be_found and self.own_p <= self.alpha < self.p

    @property
    def can_be_found(self) -> bool:
        """Whether there are enough trainings for any p-value as small as ``alpha``."""
        return self.trainings >= fewest_trainings(self.alpha)

    @property
    def is_found(self) -> bool:
        return self.can_be_found and self.p <= self.alpha


def fewest_trainings(alpha: float) -> int:
    """Return the number of trainings from which a p-value of ``alpha`` is possible.

    With n trainings there are 2**n patterns of signs, and each has its mirror image.
    """
    count = 1
    while 2.0 ** (1 - count) > alpha:
        count += 1
    return count


def judge_gaps(
    rows: Sequence[Mapping[int, float]], alpha: float, rounding: float
) -> list[ServingGap]:
    """Test the gaps of several cells together.

    Args:
        rows: Gaps by seed, at least one for each cell.
        alpha: Probability of any false claim.
        rounding: Size of a gap that is rounding. A cell without a larger one is not tested; which
            cells these are does not depend on signs, so the test of the others stays exact.
    """
    tested = [n for n, row in enumerate(rows) if max(map(abs, row.values())) >= rounding]
    found = dict(zip(tested, joint_sign_flip_test([rows[n] for n in tested]), strict=True))
    p_values = [found.get(number, (1.0, 1.0)) for number in range(len(rows))]
    return [
        ServingGap(
            math.fsum(row.values()) / len(row),
            min(row.values()),
            max(row.values()),
            len(row),
            p,
            own_p,
            alpha,
        )
        for row, (p, own_p) in zip(rows, p_values, strict=True)
    ]


def joint_sign_flip_test(rows: Sequence[Mapping[int, float]]) -> list[tuple[float, float]]:
    """Return p-values of means of zero, corrected for all rows, and of each row alone.

    Args:
        rows: Values by seed; signs of equal seeds are flipped together.

    Returns:
        The share of sign patterns in which the largest ``abs(sum) / sqrt(sum of squares)`` of all
        rows is at least that of the row, and the share in which the row's own is: of all patterns
        up to 20 seeds, else of random ones, which are always the same.
    """
    import numpy as np

    if not rows:
        return []
    seeds = sorted({seed for row in rows for seed in row})
    table = np.array([[row.get(seed, 0.0) for seed in seeds] for row in rows])
    table = table.reshape(len(rows), len(seeds))
    lengths = np.sqrt((table**2).sum(axis=1, keepdims=True))
    table = table / np.where(lengths > 0, lengths, 1.0)
    observed = np.abs(table.sum(axis=1)) - 1e-12
    reached, own_reached, patterns = np.zeros(len(rows)), np.zeros(len(rows)), 0
    for signs in _sign_patterns(len(seeds)):
        sizes = np.abs(signs @ table.T)
        reached += (sizes.max(axis=1)[:, None] >= observed).sum(axis=0)
        own_reached += (sizes >= observed).sum(axis=0)
        patterns += len(signs)
    if len(seeds) > MAX_EXACT_FLIPS:
        reached, own_reached, patterns = reached + 1, own_reached + 1, patterns + 1
    shares = (np.where(lengths[:, 0] > 0, n / patterns, 1.0) for n in (reached, own_reached))
    return [(float(p), float(own)) for p, own in zip(*shares, strict=True)]


def _sign_patterns(count: int) -> "Iterator[NDArray[np.float64]]":
    """Yield blocks of patterns; of exact ones without their mirror images."""
    import numpy as np

    if count > MAX_EXACT_FLIPS:
        random = np.random.default_rng(0)
        for _ in range(_RANDOM_FLIPS // _BLOCK):
            yield random.choice(np.array([-1.0, 1.0]), (_BLOCK, count))
        return
    n_patterns = 2 ** (count - 1) if count else 0
    for start in range(0, n_patterns, _BLOCK):
        numbers = np.arange(start, min(start + _BLOCK, n_patterns))
        yield np.where((numbers[:, None] >> np.arange(count)) & 1, 1.0, -1.0)


# Diverged trainings


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
