"""`cells`: the baseline, and the cells that `cells:` writes out."""

from collections.abc import Iterator

from kvlab.spec.design import Asked, Design, DesignError, Positions


def positions(asked: Asked) -> Iterator[Positions]:
    if not asked.cells:
        raise DesignError("design", "needs `cells:`; list at least one, as in - {heads: mqa}")
    yield asked.baseline
    yield from asked.cells


CELLS = Design("hand-picked", positions)
