"""Contrasts: effects of designs without matched pairs, and what each is aliased with.

A fraction of a full design leaves out the cells that differ in one level alone. There an effect is
a weighted sum of all cells: the least-squares estimate in the model with every main effect (and,
for an interaction, with that one), in sum-to-zero coding. Terms that the model leaves out bias the
estimate: its *aliases* are the interactions of two and of three factors with a non-zero weight in
it (the alias matrix of Box and Wilson 1951). Those of three are named too: in a design of
resolution IV a main effect has no others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

Change = tuple[tuple[str, str], ...]
"""A level, or the levels of two or three factors, each as ``(factor, level)``."""

Levels = tuple[str, ...]
Factors = Mapping[str, tuple[str, ...]]

TOLERANCE = 1e-9

ALIAS_SIZES = (2, 3)
"""Factors of the interactions that may be aliases. Larger ones are taken to be negligible."""


@dataclass(frozen=True)
class Contrast:
    """An effect as a weighted sum of cells.

    Attributes:
        weights: Non-zero weights by cell; they sum to zero.
        aliases: Interactions that the sum contains a part of: those of two factors come first.
    """

    weights: Mapping[Levels, float]
    aliases: tuple[Change, ...]


class Contrasts:
    """The contrasts of one design, each solved at its first use.

    Args:
        cells: The cells of the design.
        factors: Factor -> levels, the baseline's first.
    """

    def __init__(self, cells: Sequence[Levels], factors: Factors):
        self._cells = list(cells)
        self._factors = factors
        self._contrasts: dict[Change, Contrast | None] = {}
        self._columns: dict[tuple[str, str], Vector] = {}

    def of(self, change: Change) -> Contrast | None:
        """Return the contrast that estimates ``change``.

        None if the design cannot separate it from the other main effects.
        """
        if change not in self._contrasts:
            self._contrasts[change] = self._solve(change)
        return self._contrasts[change]

    def _solve(self, change: Change) -> Contrast | None:
        import numpy as np

        main_effects: list[Change] = [
            ((f, level),) for f, levels in self._factors.items() for level in levels[1:]
        ]
        own_terms = product(*(self._levels(factor) for factor, _ in change))
        model = [*main_effects, *own_terms] if len(change) > 1 else main_effects
        intercept = np.ones(len(self._cells))
        matrix = np.column_stack([intercept, *(self._column(term) for term in model)])
        target = np.array([0.0, *(_coefficient_share(term, change) for term in model)])
        weights = np.linalg.lstsq(matrix.T, target, rcond=None)[0]
        if np.abs(matrix.T @ weights - target).max() > TOLERANCE:
            return None
        in_model = set(model)
        aliases = tuple(term for term in self._iter_biasing(weights) if term not in in_model)
        by_cell = zip(self._cells, weights.tolist(), strict=True)
        return Contrast({cell: w for cell, w in by_cell if abs(w) > TOLERANCE}, aliases)

    def _levels(self, factor: str) -> list[tuple[str, str]]:
        return [(factor, level) for level in self._factors[factor][1:]]

    def _iter_biasing(self, weights: "Vector") -> Iterator[Change]:
        """Yield the interactions with a non-zero weight in a sum of cells, smallest first."""
        import numpy as np

        for size in ALIAS_SIZES:
            for factors in combinations(self._factors, size):
                columns = np.ones((len(self._cells), 1))
                for factor in factors:
                    own = np.column_stack([self._column((term,)) for term in self._levels(factor)])
                    columns = (columns[:, :, None] * own[:, None]).reshape(len(columns), -1)
                terms = product(*map(self._levels, factors))
                for term, share in zip(terms, weights @ columns, strict=True):
                    if abs(share) > TOLERANCE:
                        yield term

    def _column(self, term: Change) -> Any:
        """Return a term's column of the model matrix: 1 at its level, -1 at the baseline."""
        import numpy as np

        column = np.ones(len(self._cells))
        for factor, level in term:
            if (factor, level) not in self._columns:
                index, base = list(self._factors).index(factor), self._factors[factor][0]
                self._columns[factor, level] = np.array(
                    [float(c[index] == level) - float(c[index] == base) for c in self._cells]
                )
            column = column * self._columns[factor, level]
        return column


def _coefficient_share(term: Change, change: Change) -> float:
    """Return the weight of a coefficient in the difference from the baseline level.

    In sum-to-zero coding the baseline's coefficient is minus the sum of the others, so the level's
    own coefficient counts twice and each other one once; for two levels, the product of these.
    """
    if [factor for factor, _ in term] != [factor for factor, _ in change]:
        return 0.0
    share = 1.0
    for one, other in zip(term, change, strict=True):
        share *= 2.0 if one == other else 1.0
    return share
