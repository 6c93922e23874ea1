"""`seeds`: a list or a count, or a form of an extension that adds seeds stage by stage.

seeds: [0, 1, 2]
seeds: 3                     # the same
"""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from kvlab.spec.spec_model import SpecModel, TupleOf, once, raise_problems

MAX_SEED_COUNT = 1000

Seed = Annotated[int, Field(ge=0, lt=2**31)]


def _count_to_seeds(value: Any) -> Any:
    """Return the seeds from 0 that a count stands for; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if not 1 <= value <= MAX_SEED_COUNT:
        rule = f"is not a number of seeds from 1 to {MAX_SEED_COUNT:,}; for seed {value} alone"
        raise_problems([("", f"{rule} write [{value}]" if value >= 0 else "is below 0; write 3")])
    return tuple(range(value))


def _allow_count(schema: dict[str, Any]) -> None:
    """Add the count to a JSON Schema of the list."""
    count = {"type": "integer", "minimum": 1, "maximum": MAX_SEED_COUNT}
    listed = {key: schema.pop(key) for key in ("type", "items")} | {"minItems": 1}
    schema["anyOf"] = [count, listed]


Seeds = Annotated[
    TupleOf[Seed],
    Field(min_length=1, json_schema_extra=_allow_count),
    BeforeValidator(_count_to_seeds),
    once("a seed"),
]


class StagedSeeds(SpecModel):
    """`seeds` that are added stage by stage: a form of the table ``staged_seeds``, by its key.

    Attributes:
        planner: Its `kvlab.sweep.planning.stages.StagePlanner`, as ``module:class``.
    """

    planner: ClassVar[str]

    @property
    @abstractmethod
    def most(self) -> tuple[int, ...]:
        """All seeds that a cell may get."""
