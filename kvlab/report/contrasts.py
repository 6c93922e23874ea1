"""Effects of designs without matched pairs, and what each is aliased with.

A fraction of a full design leaves out the cells that differ in one level alone. There an effect
is a weighted sum of all cells: the least-squares estimate of the model with every main effect
(and, for an interaction, with that one), in sum-to-zero coding. What the model leaves out leaks
into it: its *aliases* are the two-way interactions with a weight in it that is not zero (the
alias matrix of Box and Wilson 1951).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

Change = tuple[tuple[str, str], ...]
"""A level, or two levels of two factors, each as ``(factor, level)``."""

Levels = tuple[str, ...]
Factors = Mapping[str, tuple[str, ...]]

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Contrast:
    """An effect as a weighted sum of cells.

    Attributes:
        weights: of the cells that count; they sum to zero.
        aliases: interactions that the sum cannot be told apart from.
    """

    weights: Mapping[Levels, float]
    aliases: tuple[Change, ...]


class Contrasts:
    """The contrasts of one design; its matrices are made once, at first use."""

    def __init__(self, cells: Sequence[Levels], factors: Factors):
        self._cells = list(cells)
        self._factors = factors
        self._made: dict[Change, Contrast | None] = {}
        self._columns: dict[tuple[str, str], Vector] = {}

    def of(self, change: Change) -> Contrast | None:
        """None: the design cannot estimate it beside the other main effects."""
        if change not in self._made:
            self._made[change] = self._make(change)
        return self._made[change]

    def _make(self, change: Change) -> Contrast | None:
        import numpy as np

        mains: list[Change] = [
            ((f, level),) for f, levels in self._factors.items() for level in levels[1:]
        ]
        own = product(*(self._levels(factor) for factor, _ in change))
        model = [*mains, *own] if len(change) > 1 else mains
        ones = np.ones(len(self._cells))
        matrix = np.column_stack([ones, *(self._column(term) for term in model)])
        target = np.array([0.0, *(_coefficient_share(term, change) for term in model)])
        weights = np.linalg.lstsq(matrix.T, target, rcond=None)[0]
        if np.abs(matrix.T @ weights - target).max() > TOLERANCE:
            return None
        known = set(model)
        aliases = tuple(
            term
            for term in self._interactions()
            if term not in known and abs(float(self._column(term) @ weights)) > TOLERANCE
        )
        kept = zip(self._cells, weights.tolist(), strict=True)
        return Contrast({cell: w for cell, w in kept if abs(w) > TOLERANCE}, aliases)

    def _levels(self, factor: str) -> list[tuple[str, str]]:
        return [(factor, level) for level in self._factors[factor][1:]]

    def _interactions(self) -> list[Change]:
        return [
            (one, other)
            for first, second in combinations(self._factors, 2)
            for one, other in product(self._levels(first), self._levels(second))
        ]

    def _column(self, term: Change) -> Any:
        """A term of the model over the cells: 1 at its level, -1 at the baseline, else 0."""
        import numpy as np

        column = np.ones(len(self._cells))
        for factor, level in term:
            if (factor, level) not in self._columns:
                place, base = list(self._factors).index(factor), self._factors[factor][0]
                self._columns[factor, level] = np.array(
                    [float(c[place] == level) - float(c[place] == base) for c in self._cells]
                )
            column = column * self._columns[factor, level]
        return column


def _coefficient_share(term: Change, change: Change) -> float:
    """How often a coefficient counts in the difference from the baseline level (or, of two
    levels, in the difference of differences): the baseline's is minus the sum of the others."""
    if [factor for factor, _ in term] != [factor for factor, _ in change]:
        return 0.0
    share = 1.0
    for one, other in zip(term, change, strict=True):
        share *= 2.0 if one == other else 1.0
    return share
