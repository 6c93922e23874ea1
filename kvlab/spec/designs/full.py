"""`full`: every combination."""

from collections.abc import Iterator
from itertools import product

from kvlab.spec.design import Asked, Design, Positions


def positions(asked: Asked) -> Iterator[Positions]:
    return product(*(range(len(axis.points)) for axis in asked.axes))


FULL = Design("full factorial", positions)
