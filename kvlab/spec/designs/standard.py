"""The designs that take a few lines each. All but ``cells`` follow from the axes."""

from collections.abc import Iterator
from itertools import combinations, product

from kvlab.spec.design import Design, DesignError, DesignRequest, Positions


def full_factorial(request: DesignRequest) -> Iterator[Positions]:
    """Yield every combination."""
    return product(*(range(len(axis.points)) for axis in request.axes))


def one_factor_at_a_time(request: DesignRequest) -> Iterator[Positions]:
    """Yield the baseline, and each other level alone."""
    yield request.baseline
    for index, axis in enumerate(request.axes):
        for position in range(1, len(axis.points)):
            yield request.change_baseline({index: position})


def baseline_alone(request: DesignRequest) -> Iterator[Positions]:
    """Yield the baseline, which all others are compared with; for more seeds of it."""
    yield request.baseline


def leave_one_out(request: DesignRequest) -> Iterator[Positions]:
    """Yield the baseline, all reductions together, and all but each one."""
    reductions = dict(request.reductions())
    yield request.baseline
    yield request.change_baseline(reductions)
    for left_out in reductions:
        yield request.change_baseline({i: p for i, p in reductions.items() if i != left_out})


def cumulative(request: DesignRequest) -> Iterator[Positions]:
    """Yield the baseline, then one more reduction each time, in the order of the factors."""
    reductions = request.reductions()
    for count in range(len(reductions) + 1):
        yield request.change_baseline(dict(reductions[:count]))


def pairwise(request: DesignRequest) -> Iterator[Positions]:
    """Yield the baseline, each other level alone, and every two of them together.

    These are the fewest cells that show every interaction of two factors against the baseline.
    """
    yield from one_factor_at_a_time(request)
    levels = [(index, range(1, len(axis.points))) for index, axis in enumerate(request.axes)]
    for (first, first_levels), (second, second_levels) in combinations(levels, 2):
        for one, other in product(first_levels, second_levels):
            yield request.change_baseline({first: one, second: other})


def hand_picked(request: DesignRequest) -> Iterator[Positions]:
    """Yield the baseline, and the cells that `cells` lists."""
    if not request.cells:
        raise DesignError("design", "needs `cells:`; list at least one, as in - {heads: mqa}")
    yield request.baseline
    yield from request.cells


FULL = Design("full factorial", full_factorial)
ONE_FACTOR = Design("one-factor-at-a-time", one_factor_at_a_time)
BASELINE = Design("baseline alone", baseline_alone)
LEAVE_ONE_OUT = Design("leave-one-out", leave_one_out, keys=frozenset({"target"}))
CUMULATIVE = Design("cumulative", cumulative, keys=frozenset({"target"}))
PAIRWISE = Design("pairwise", pairwise)
CELLS = Design("hand-picked", hand_picked, keys=frozenset({"cells"}))
