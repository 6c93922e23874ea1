"""`one_factor`: the baseline, and each other level alone."""

from collections.abc import Iterator

from kvlab.spec.design import Asked, Design, Positions


def positions(asked: Asked) -> Iterator[Positions]:
    yield asked.baseline
    for place, axis in enumerate(asked.axes):
        for position in range(1, len(axis.points)):
            yield asked.changed({place: position})


ONE_FACTOR = Design("one-factor-at-a-time", positions)
