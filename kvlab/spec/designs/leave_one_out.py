"""`leave_one_out`: the baseline, all reductions together, and all but each one."""

from collections.abc import Iterator

from kvlab.spec.design import Asked, Design, Positions


def positions(asked: Asked) -> Iterator[Positions]:
    together = dict(asked.reductions())
    yield asked.baseline
    yield asked.changed(together)
    for place in together:
        yield asked.changed({other: at for other, at in together.items() if other != place})


LEAVE_ONE_OUT = Design("leave-one-out", positions)
