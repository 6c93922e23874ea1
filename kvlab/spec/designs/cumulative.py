"""`cumulative`: the baseline, then one reduction after the other, in the order of the factors."""

from collections.abc import Iterator

from kvlab.spec.design import Asked, Design, Positions


def positions(asked: Asked) -> Iterator[Positions]:
    steps = asked.reductions()
    for count in range(len(steps) + 1):
        yield asked.changed(dict(steps[:count]))


CUMULATIVE = Design("cumulative", positions)
