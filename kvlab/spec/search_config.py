"""`search` of a sweep: a space that is too big for a grid, and what to look for in it.

With `search.pruning`, trainings that are far behind pause early, and the others get their time:

pruning: {rule: halving, factor: 3, first: 0.1}      rungs at 1/9 and 1/3 of the steps
pruning: {rule: median, rungs: [0.1, 0.3], startup: 5}
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_serializer, field_validator

from kvlab.spec import spec_model as spec
from kvlab.spec.validation_errors import format_value

Values = Annotated[spec.TupleOf[Any], Field(min_length=1, max_length=1000), spec.once("a value")]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return the last part of each dotted key, or the whole key if two would be alike."""
    keys = tuple(keys)
    counts = Counter(key.rpartition(".")[2] for key in keys)
    return {key: key if counts[last := key.rpartition(".")[2]] > 1 else last for key in keys}


def format_setting(value: Any) -> str:
    """Return a value of a setting as YAML would write it; numbers with four significant digits."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {format_setting(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_setting, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else format_value(value)


def format_settings(settings: Mapping[str, Any]) -> str:
    """Return the settings of a suggestion, such as ``n_kv_head=1 window=32``."""
    names = short_keys(settings)
    return " ".join(f"{names[key]}={format_setting(value)}" for key, value in settings.items())


def split_sampler(sampler: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a sampler, and its arguments."""
    arguments: dict[str, Any] = {"name": sampler} if isinstance(sampler, str) else dict(sampler)
    return arguments.pop("name", None), arguments


class Range(spec.SpecModel):
    """Numbers from ``low`` to ``high``, both included."""

    low: FiniteFloat
    """Lowest number. Unit: of the key. Example: 128"""
    high: FiniteFloat
    """Highest number. Unit: of the key. Example: 1024"""
    log: bool = False
    """Drawn evenly in the logarithm. Example: true"""
    whole: bool = False
    """Whole numbers only. Example: true"""
    step: spec.PositiveFloat | None = None
    """Only low, low + step, ... Unit: of the key. Example: 64"""

    def _find_problems(self) -> spec.Problems:
        if self.low >= self.high:
            yield "high", f"is not above low = {self.low:g}; use a larger number"
        if self.log and (self.low <= 0 or self.step is not None):
            yield "log", "needs low above 0 and no step; change one of them"
        if self.whole and not all(n.is_integer() for n in (self.low, self.high, self.step or 1.0)):
            yield "whole", "needs whole low, high and step; round them"


class Limit(spec.SpecModel):
    """Bounds of a number; one or both."""

    at_most: FiniteFloat | None = None
    """Largest value allowed. Unit: of the number. Default: no bound. Example: 32768"""
    at_least: FiniteFloat | None = None
    """Smallest value allowed. Unit: of the number. Default: no bound. Example: 0.25"""

    def _find_problems(self) -> spec.Problems:
        low, high = self.at_least, self.at_most
        if low is None and high is None:
            yield "at_most", "and at_least are both missing; give one"
        elif low is not None and high is not None and low > high:
            yield "at_least", f"is above at_most = {high:g}; lower it"


Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]

INCOMPARABLE_KEYS = ("data.", "training.evaluate_tokens", "model.block_size")
"""Keys whose values decide which tokens validation losses are of, so no rung compares them."""


class PruningConfig(spec.SpecModel):
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
    factor: Annotated[spec.PositiveInt, Field(ge=2, le=100)] | None = None
    """halving: one in so many goes on.
    Unit: none. Default: 3 under halving. Example: 4, rule: halving"""
    first: Annotated[float, Field(ge=0.001, lt=1.0)] | None = None
    """No rung before this fraction of the steps.
    Unit: share. Default: 0.1. Example: 0.2, rule: halving"""
    rungs: Annotated[spec.TupleOf[Fraction], Field(min_length=1)] | None = None
    """Fractions of the steps.
    Unit: share. Default: halving: 1/factor, 1/factor^2, ... down to first; median: first, and twice
    as far each time. Example: [0.2, 0.5], rule: median"""
    startup: spec.PositiveInt | None = None
    """median: others at a rung before one is pruned.
    Unit: trainings. Default: 5 under median. Example: 8, rule: median"""

    @field_validator("factor", "rungs", "startup")
    @classmethod
    def _fill_from_others(cls, value: Any, info: ValidationInfo) -> Any:
        match info.field_name, info.data:  # without the keys that are wrong
            case _ if value is not None:
                return value
            case "factor", {"rule": "halving"}:
                return 3
            case "rungs", {"rule": rule, "factor": factor, "first": first}:
                return _default_rungs(rule, factor, first)
            case "startup", {"rule": "median"}:
                return 5
        return None

    def _find_problems(self) -> spec.Problems:
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


def _default_rungs(rule: str, factor: int, first: float | None) -> tuple[float, ...]:
    if rule == "median":
        doubled = ((first or 0.1) * 2**n for n in itertools.count())
        return tuple(itertools.takewhile(lambda rung: rung < 1, doubled))
    rungs, lowest = [1.0 / factor], first or min(0.1, 1 / factor)
    while rungs[0] / factor >= lowest * (1 - 1e-9):
        rungs.insert(0, rungs[0] / factor)
    return tuple(rungs)


class SearchConfig(spec.SpecModel):
    """`search`: where to look, what for, and for how long.

    Objectives and limits name measured numbers (``loss_served``, ``tpot_ms_p50``, ...) or what
    is known beforehand: ``parameters``, ``kv_bytes`` (one sequence at the block size),
    ``kv_bytes_per_token``, ``training_flops``. A suggestion beyond a limit on the latter is
    never trained.
    """

    choices: dict[spec.DottedKey, Values] = {}
    """Values to choose from, by dotted key. Example: {model.n_kv_head: [1, 2, 4]}"""
    ranges: dict[spec.DottedKey, Range] = {}
    """Ranges of numbers to draw from, by dotted key.
    Example: {model.ffn_dim: {low: 64, high: 512, whole: true}}"""
    objectives: Annotated[
        spec.TupleOf[str], Field(min_length=1, max_length=4), spec.once("a number")
    ]
    """Numbers to improve; with several, a Pareto front. Example: [loss_served, kv_bytes]"""
    limits: dict[str, Limit] = {}
    """Bounds of measured or predicted numbers. Example: {kv_bytes: {at_most: 32768}}"""
    sampler: str | dict[str, Any] = "TPESampler"
    """A class of optuna.samplers, with its arguments as {name: TPESampler, multivariate: true}.
    Case and the ending Sampler may be left out.
    Example: {name: TPESampler, multivariate: true}"""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the sampler. Example: 7"""
    parallel: Annotated[spec.PositiveInt, Field(le=1000)] = 1
    """Suggestions in flight at once. Unit: trials. Example: 2"""
    pruning: PruningConfig | None = None
    """Pause trainings early that are far behind. Default: none. Example: {rule: halving}"""
    trials: spec.PositiveInt | None = None
    """Stop after this many trained suggestions. Unit: trials. Default: no bound. Example: 24"""
    flops: spec.PositiveFloat | None = None
    """Stop after these training FLOPs, really spent.
    Unit: FLOPs. Default: no bound. Example: 1e15"""
    hours: spec.PositiveFloat | None = None
    """Stop after this time of searching. Unit: hours. Default: no bound. Example: 8"""

    def _find_problems(self) -> spec.Problems:
        if not self.choices and not self.ranges:
            yield "choices", "and ranges are both empty; give at least one key to vary"
        for key in self.ranges:
            if key in self.choices:
                yield f"ranges.{key}", "is in choices too; remove one"
        for name, keys in (("choices", self.choices), ("ranges", self.ranges)):
            for key in keys:
                if key.startswith("resources."):
                    yield name, f"names {key}, which changes where a trial runs; leave it out"
        if self.trials is None and self.flops is None and self.hours is None:
            yield "trials", "is missing, as are flops and hours; give one of them"
        if not isinstance(self.sampler, str) and not isinstance(self.sampler.get("name"), str):
            yield "sampler", "has no name; write one such as {name: TPESampler, multivariate: true}"
        for key in (*self.choices, *self.ranges) if self.pruning is not None else ():
            if key.startswith(INCOMPARABLE_KEYS):
                text = f"compares validation losses, which are of other tokens for another {key}"
                yield "pruning", f"{text}; remove one"
