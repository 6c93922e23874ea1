"""`seeds: {looks: [3, 5, 7, 10]}`: looks at which it is decided which seeds are still needed."""

from typing import Annotated

from pydantic import Field

from kvlab.spec.seeds_config import Seed, StagedSeeds
from kvlab.spec.spec_model import PositiveInt, Problems, TupleOf

MAX_LOOKS = 20


class SeedLooks(StagedSeeds):
    """`seeds` of a sweep that is looked at while it gets seeds.

    After each look only what is undecided is trained at further seeds, with the cells that it is
    compared with. `kvlab.extensions.looks.sequential` says how the looks share one error.
    """

    planner = "kvlab.extensions.looks.planning:LookPlanner"

    looks: Annotated[TupleOf[PositiveInt], Field(min_length=2, max_length=MAX_LOOKS)]
    """Number of seeds at each look, increasing; the last is the most.
    Unit: seeds. Example: [3, 5, 7, 10]"""
    first: Seed = 0
    """The first seed; the others follow it. Example: 100, looks: [3, 5, 7, 10]"""

    def _find_problems(self) -> Problems:
        if self.looks[0] < 2:
            yield "looks.0", "is one seed, which gives no error; begin with 2 or more"
        for number, (before, after) in enumerate(zip(self.looks, self.looks[1:], strict=False), 1):
            if after <= before:
                yield f"looks.{number}", f"is not above {before}, the look before; use a larger one"
        if self.first + self.looks[-1] > 2**31:
            yield "first", "leaves too few seeds below 2147483648; use a smaller one"

    @property
    def most(self) -> tuple[int, ...]:
        return self.list_seeds(self.looks[-1])

    def list_seeds(self, count: int) -> tuple[int, ...]:
        """Return the first ``count`` seeds."""
        return tuple(range(self.first, self.first + count))
