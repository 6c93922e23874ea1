"""`seeds`: a list or a count, or looks at which it is decided which seeds are still needed.

seeds: [0, 1, 2]
seeds: 3                     # the same
seeds: {looks: [3, 5, 7, 10]}
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, WrapValidator

from kvlab.spec.spec_model import PositiveInt, Problems, SpecModel, TupleOf, once, raise_problems

MAX_LOOKS = 20
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


class SeedLooks(SpecModel):
    """`seeds` of a sweep that is looked at while it gets seeds.

    After each look only what is undecided is trained at further seeds, with the cells that it is
    compared with. `kvlab.analysis.sequential` says how the looks share one error.
    """

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

    def seeds(self, count: int) -> tuple[int, ...]:
        """Return the first ``count`` seeds."""
        return tuple(range(self.first, self.first + count))


_LIST: TypeAdapter[tuple[int, ...]] = TypeAdapter(Seeds)


def _validate_seeds(value: Any, _handler: Any) -> Any:
    """Validate a mapping as looks, anything else as seeds: an error is about one of them."""
    if isinstance(value, dict | SeedLooks):
        return SeedLooks.model_validate(value)
    return _LIST.validate_python(value, strict=True)


SeedsField = Annotated[Seeds | SeedLooks, WrapValidator(_validate_seeds)]
