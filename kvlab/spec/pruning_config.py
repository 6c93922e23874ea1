"""`search.pruning`: trainings that are far behind pause early, and the others get their time.

pruning: {rule: halving, factor: 3, first: 0.1}      rungs at 1/9 and 1/3 of the steps
pruning: {rule: median, rungs: [0.1, 0.3], startup: 5}
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_serializer, field_validator, model_validator

from kvlab.spec.spec_model import (
    FieldMessage,
    PositiveInt,
    SpecModel,
    TupleOf,
    raise_problems,
)

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]

INCOMPARABLE_KEYS = ("data.", "training.evaluate_tokens")
"""Keys whose values decide which tokens validation losses are of, so no rung compares them."""


class PruningConfig(SpecModel):
    """At which fractions of its steps a training pauses, and which of them go on.

    At a rung the validation loss decides, whatever the objectives are. ``halving`` lets the best
    ``1/factor`` of those that reached a rung go on, and one that waits goes on as soon as its
    rung has room: asynchronous successive halving (Li et al., 2020, "A System for Massively
    Parallel Hyperparameter Tuning"). ``median`` lets go on what is not worse than the median of
    the others at the rung (Golovin et al., 2017, "Google Vizier"). Neither changes what a trial
    that goes on computes.
    """

    rule: Literal["halving", "median"]
    """Which trainings go on at a rung. Example: halving"""
    factor: Annotated[PositiveInt, Field(ge=2, le=100)] | None = Field(
        default=None, validate_default=True
    )
    """halving: one in so many goes on.
    Unit: none. Default: 3 under halving. Example: 4, rule: halving"""
    first: Annotated[float, Field(ge=0.001, lt=1.0)] | None = None
    """No rung before this fraction of the steps.
    Unit: share. Default: 0.1. Example: 0.2, rule: halving"""
    rungs: Annotated[TupleOf[Fraction], Field(min_length=1)] | None = Field(
        default=None, validate_default=True
    )
    """Fractions of the steps.
    Unit: share. Default: halving: 1/factor, 1/factor^2, ... down to first; median: first, and twice
    as far each time. Example: [0.2, 0.5], rule: median"""
    startup: PositiveInt | None = None
    """median: others at a rung before one is pruned.
    Unit: trainings. Default: 5 under median. Example: 8, rule: median"""

    @field_validator("factor")
    @classmethod
    def _fill_factor(cls, factor: int | None, info: ValidationInfo) -> int | None:
        return 3 if factor is None and info.data.get("rule") == "halving" else factor

    @field_validator("rungs")
    @classmethod
    def _fill_rungs(
        cls, rungs: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        if rungs is not None or not {"rule", "factor", "first"} <= info.data.keys():
            return rungs
        return _default_rungs(info.data["rule"], info.data["factor"], info.data["first"])

    @field_validator("startup")
    @classmethod
    def _fill_startup(cls, startup: int | None, info: ValidationInfo) -> int | None:
        return 5 if startup is None and info.data.get("rule") == "median" else startup

    @model_validator(mode="after")
    def _check(self) -> "PruningConfig":
        raise_problems(self._find_problems())
        return self

    def _find_problems(self) -> Iterator[FieldMessage]:
        for name, rule in (("factor", "halving"), ("startup", "median")):
            if getattr(self, name) is not None and self.rule != rule:
                yield name, f"is used by rule: {rule} alone; leave it out"
        if "rungs" in self.model_fields_set and self.first is not None:
            yield "first", "and rungs both place the rungs; remove one"
        if self.rungs is not None and list(self.rungs) != sorted(set(self.rungs)):
            yield "rungs", "must ascend, each once; sort them"
        share = 1 / (self.factor or 3)
        if self.rule == "halving" and self.first is not None and self.first > share:
            text = f"is past 1/factor = {share:.3g}, the last rung of halving"
            yield "first", f"{text}; lower it, or name the rungs"

    @field_serializer("first")
    def _omit_first(self, _first: float | None) -> None:
        """``first`` only places the default rungs, so two spellings of one search are equal."""

    def steps(self, total: int) -> tuple[int, ...]:
        """Return the steps after which the rungs of a training of ``total`` steps stand.

        Rungs that would stand at the training's own end are left out.
        """
        assert self.rungs is not None, "filled in"
        steps = (max(1, round(fraction * total)) for fraction in self.rungs)
        return tuple(step for step in steps if step < total)


def _default_rungs(rule: str, factor: int | None, first: float | None) -> tuple[float, ...]:
    if rule == "median":
        rungs = [first or 0.1]
        while rungs[-1] * 2 < 1:
            rungs.append(rungs[-1] * 2)
        return tuple(rungs)
    assert factor is not None, "filled in"
    rungs = [1.0 / factor]
    lowest = first or min(0.1, 1 / factor)
    while rungs[-1] / factor >= lowest * (1 - 1e-9):
        rungs.append(rungs[-1] / factor)
    return tuple(rungs[::-1])


def find_pruning_problems(
    pruning: PruningConfig | None, keys: Iterable[str]
) -> Iterator[FieldMessage]:
    """Yield a problem for each varied key under which validation losses are not comparable."""
    for key in keys if pruning is not None else ():
        if key.startswith(INCOMPARABLE_KEYS):
            text = f"compares validation losses, which are of other tokens for another {key}"
            yield "pruning", f"{text}; remove one"
