"""`pairwise`: the baseline, each other level alone, and every two of them together.

The least that shows every interaction of two factors against the baseline.
"""

from collections.abc import Iterator
from itertools import combinations, product

from kvlab.spec.design import Asked, Design, Positions


def positions(asked: Asked) -> Iterator[Positions]:
    yield asked.baseline
    places = [(place, range(1, len(axis.points))) for place, axis in enumerate(asked.axes)]
    for place, others in places:
        yield from (asked.changed({place: position}) for position in others)
    for (one, ones), (other, others) in combinations(places, 2):
        yield from (asked.changed({one: a, other: b}) for a, b in product(ones, others))


PAIRWISE = Design("pairwise", positions)
