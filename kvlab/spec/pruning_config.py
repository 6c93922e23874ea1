"""`search.pruning`: trainings that are far behind pause early, and the others get their time.

pruning: {rule: halving, factor: 3, first: 0.1}      rungs at 1/9 and 1/3 of the steps
pruning: {rule: median, rungs: [0.1, 0.3], startup: 5}
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvlab.spec.spec_model import PositiveInt, SpecModel, raise_problems

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]

INCOMPARABLE_KEYS = ("data.", "training.evaluate_tokens")
"""Keys under which validation losses are of other tokens, so that no rung compares them."""


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class PruningConfig(SpecModel):
    """At which fractions of its steps a training pauses, and which of them go on.

    At a rung the validation loss decides, whatever the objectives are. ``halving`` lets the best
    ``1/factor`` of those that reached a rung go on, and one that waits goes on as soon as its
    rung has room: asynchronous successive halving (Li et al., 2020, "A System for Massively
    Parallel Hyperparameter Tuning"). ``median`` lets go on what is not worse than the median of
    the others at the rung (Golovin et al., 2017, "Google Vizier"). Neither changes what a trial
    that goes on computes.
    """

    rule: Literal["halving", "median"] = Field(description="Which trainings go on at a rung.")
    factor: Annotated[PositiveInt, Field(ge=2, le=100)] | None = Field(
        default=None, description="halving: one in so many goes on; default 3."
    )
    first: Annotated[float, Field(ge=0.001, lt=1.0)] | None = Field(
        default=None, description="No rung before this fraction of the steps; default 0.1."
    )
    rungs: Annotated[tuple[Fraction, ...], BeforeValidator(_tuple), Field(min_length=1)] | None = (
        Field(
            default=None,
            description="Fractions of the steps. Default: halving 1/factor, 1/factor^2, ... down"
            " to first; median first, and twice as far each time.",
        )
    )
    startup: PositiveInt | None = Field(
        default=None, description="median: others at a rung before one is pruned; default 5."
    )

    @model_validator(mode="after")
    def _check(self) -> "PruningConfig":
        problems = []
        for name, rule in (("factor", "halving"), ("startup", "median")):
            if getattr(self, name) is not None and self.rule != rule:
                problems.append((name, f"is used by rule: {rule} alone; leave it out"))
        if self.rungs is not None and self.first is not None:
            problems.append(("first", "and rungs both say where; leave one out"))
        if self.rungs is not None and list(self.rungs) != sorted(set(self.rungs)):
            problems.append(("rungs", "must ascend, each once; sort them"))
        share = 1 / (self.factor or 3)
        if self.rule == "halving" and self.first is not None and self.first > share:
            text = f"is past 1/factor = {share:.3g}, the last rung of halving"
            problems.append(("first", f"{text}; lower it, or name the rungs"))
        raise_problems(problems)
        if self.rule == "halving" and self.factor is None:
            object.__setattr__(self, "factor", 3)
        if self.rule == "median" and self.startup is None:
            object.__setattr__(self, "startup", 5)
        if self.rungs is None:
            first = self.first or (min(0.1, share) if self.rule == "halving" else 0.1)
            object.__setattr__(self, "rungs", _default_rungs(first, self.factor))
        object.__setattr__(self, "first", None)
        return self

    def steps(self, total: int) -> tuple[int, ...]:
        """After which step of a training of ``total`` steps each rung stands; ends where a rung
        would be no earlier than the training's own end."""
        assert self.rungs is not None, "filled in"
        found = (max(1, round(fraction * total)) for fraction in self.rungs)
        return tuple(step for step in found if step < total)


def _default_rungs(first: float, factor: int | None) -> tuple[float, ...]:
    if factor is None:
        found = [first]
        while found[-1] * 2 < 1:
            found.append(found[-1] * 2)
        return tuple(found)
    down = [1.0 / factor]
    while down[-1] / factor >= first * (1 - 1e-9):
        down.append(down[-1] / factor)
    return tuple(down[::-1])


def pruning_problems(pruning: PruningConfig | None, keys: list[str]) -> list[tuple[str, str]]:
    """Whatever varies must leave validation losses comparable."""
    if pruning is None:
        return []
    return [
        (
            "pruning",
            f"compares validation losses, and those under another {key} are of other tokens;"
            " leave one out",
        )
        for key in keys
        if key.startswith(INCOMPARABLE_KEYS)
    ]
