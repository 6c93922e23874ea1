"""`full`: every combination."""

from collections.abc import Iterator
from itertools import combinations, product

from kvlab.spec.design import Design, DesignError, DesignRequest, Positions


def full_factorial(asked: DesignRequest) -> Iterator[Positions]:
    return product(*(range(len(axis.points)) for axis in asked.axes))


FULL = Design("full factorial", full_factorial)


# `one_factor`: the baseline, and each other level alone.


def one_factor_at_a_time(asked: DesignRequest) -> Iterator[Positions]:
    yield asked.baseline
    for place, axis in enumerate(asked.axes):
        for position in range(1, len(axis.points)):
            yield asked.changed({place: position})


ONE_FACTOR = Design("one-factor-at-a-time", one_factor_at_a_time)


# `leave_one_out`: the baseline, all reductions together, and all but each one.


def leave_one_out(asked: DesignRequest) -> Iterator[Positions]:
    together = dict(asked.reductions())
    yield asked.baseline
    yield asked.changed(together)
    for place in together:
        yield asked.changed({other: at for other, at in together.items() if other != place})


LEAVE_ONE_OUT = Design("leave-one-out", leave_one_out)


# `cumulative`: the baseline, then one reduction after the other, in the order of the factors.


def cumulative(asked: DesignRequest) -> Iterator[Positions]:
    steps = asked.reductions()
    for count in range(len(steps) + 1):
        yield asked.changed(dict(steps[:count]))


CUMULATIVE = Design("cumulative", cumulative)


# `pairwise`: the baseline, each other level alone, and every two of them together.
#
# The least that shows every interaction of two factors against the baseline.


def pairwise(asked: DesignRequest) -> Iterator[Positions]:
    yield asked.baseline
    places = [(place, range(1, len(axis.points))) for place, axis in enumerate(asked.axes)]
    for place, others in places:
        yield from (asked.changed({place: position}) for position in others)
    for (one, ones), (other, others) in combinations(places, 2):
        yield from (asked.changed({one: a, other: b}) for a, b in product(ones, others))


PAIRWISE = Design("pairwise", pairwise)


# `cells`: the baseline, and the cells that `cells:` writes out.


def hand_picked(asked: DesignRequest) -> Iterator[Positions]:
    if not asked.cells:
        raise DesignError("design", "needs `cells:`; list at least one, as in - {heads: mqa}")
    yield asked.baseline
    yield from asked.cells


CELLS = Design("hand-picked", hand_picked)
