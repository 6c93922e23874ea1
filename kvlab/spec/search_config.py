"""`search` of a sweep: a space that is too big for a grid, and what to look for in it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from kvlab.spec.pruning_config import PruningConfig, find_pruning_problems
from kvlab.spec.spec_model import (
    FieldMessage,
    PositiveFloat,
    PositiveInt,
    SpecModel,
    TupleOf,
    raise_problems,
)
from kvlab.spec.validation_errors import format_value

Values = Annotated[TupleOf[Any], Field(min_length=1, max_length=1000)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return the last part of each dotted key, or the whole key if two would be alike."""
    keys = tuple(keys)
    counts = Counter(key.rpartition(".")[2] for key in keys)
    return {key: key if counts[last := key.rpartition(".")[2]] > 1 else last for key in keys}


def format_setting(value: Any) -> str:
    """Return a value of a setting; numbers with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else format_value(value)


def format_settings(settings: Mapping[str, Any]) -> str:
    """Return the settings of a suggestion, such as ``n_kv_head=1 window=32``."""
    names = short_keys(settings)
    return " ".join(f"{names[key]}={format_setting(value)}" for key, value in settings.items())


def split_sampler(sampler: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a sampler, and its arguments."""
    arguments: dict[str, Any] = {"name": sampler} if isinstance(sampler, str) else dict(sampler)
    return arguments.pop("name", None), arguments


class Range(SpecModel):
    """Numbers from ``low`` to ``high``, both included."""

    low: FiniteFloat
    """Lowest number. Unit: of the key. Example: 128"""
    high: FiniteFloat
    """Highest number. Unit: of the key. Example: 1024"""
    log: bool = False
    """Drawn evenly in the logarithm. Example: true"""
    whole: bool = False
    """Whole numbers only. Example: true"""
    step: PositiveFloat | None = None
    """Only low, low + step, ... Unit: of the key. Example: 64"""

    @model_validator(mode="after")
    def _check(self) -> "Range":
        raise_problems(self._find_problems())
        return self

    def _find_problems(self) -> Iterator[FieldMessage]:
        if self.low >= self.high:
            yield "high", f"is not above low = {self.low:g}; use a larger number"
        if self.log and (self.low <= 0 or self.step is not None):
            yield "log", "needs low above 0 and no step; change one of them"
        if self.whole and not all(n.is_integer() for n in (self.low, self.high, self.step or 1.0)):
            yield "whole", "needs whole low, high and step; round them"

    def count(self) -> int | None:
        """Return how many numbers the range has, None if they cannot be counted."""
        if not self.whole and self.step is None:
            return None
        return int((self.high - self.low) / (self.step or 1.0) + 1e-8) + 1

    def points(self) -> list[float] | None:
        """Return every number of the range, None if they cannot be counted."""
        count = self.count()
        if count is None:
            return None
        numbers = (self.low + (self.step or 1.0) * index for index in range(count))
        return [round(number) if self.whole else number for number in numbers]


class Limit(SpecModel):
    """Bounds of a number; one or both."""

    at_most: FiniteFloat | None = None
    """Largest value allowed. Unit: of the number. Default: no bound. Example: 32768"""
    at_least: FiniteFloat | None = None
    """Smallest value allowed. Unit: of the number. Default: no bound. Example: 0.25"""

    @model_validator(mode="after")
    def _check(self) -> "Limit":
        if self.at_most is None and self.at_least is None:
            raise_problems([("at_most", "and at_least are both missing; give one")])
        return self


class SearchConfig(SpecModel):
    """`search`: where to look, what for, and for how long.

    Objectives and limits name measured numbers (``loss_served``, ``tpot_ms_p50``, ...) or what
    is known beforehand: ``parameters``, ``kv_bytes`` (one sequence at the block size),
    ``kv_bytes_per_token``, ``training_flops``. A suggestion beyond a limit on the latter is
    never trained.
    """

    choices: dict[str, Values] = {}
    """Values to choose from, by dotted key. Example: {model.n_kv_head: [1, 2, 4]}"""
    ranges: dict[str, Range] = {}
    """Ranges of numbers to draw from, by dotted key.
    Example: {model.ffn_dim: {low: 64, high: 512, whole: true}}"""
    objectives: Annotated[TupleOf[str], Field(min_length=1, max_length=4)]
    """Numbers to improve; with several, a Pareto front. Example: [loss_served, kv_bytes]"""
    limits: dict[str, Limit] = {}
    """Bounds of measured or predicted numbers. Example: {kv_bytes: {at_most: 32768}}"""
    sampler: str | dict[str, Any] = "TPESampler"
    """A class of optuna.samplers, with its arguments as {name: TPESampler, multivariate: true}.
    Case and the ending Sampler may be left out.
    Example: {name: TPESampler, multivariate: true}"""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the sampler. Example: 7"""
    parallel: Annotated[PositiveInt, Field(le=1000)] = 1
    """Suggestions in flight at once. Unit: trials. Example: 2"""
    pruning: PruningConfig | None = None
    """Pause trainings early that are far behind. Default: none. Example: {rule: halving}"""
    trials: PositiveInt | None = None
    """Stop after this many trained suggestions. Unit: trials. Default: no bound. Example: 24"""
    flops: PositiveFloat | None = None
    """Stop after these training FLOPs, really spent.
    Unit: FLOPs. Default: no bound. Example: 1e15"""
    hours: PositiveFloat | None = None
    """Stop after this time of searching. Unit: hours. Default: no bound. Example: 8"""

    @model_validator(mode="after")
    def _check(self) -> "SearchConfig":
        raise_problems(
            [
                *self._find_space_problems(),
                *self._find_goal_problems(),
                *find_pruning_problems(self.pruning, [*self.choices, *self.ranges]),
            ]
        )
        return self

    def _find_space_problems(self) -> Iterator[FieldMessage]:
        if not self.choices and not self.ranges:
            yield "choices", "and ranges are both empty; give at least one key to vary"
        for key in self.ranges:
            if key in self.choices:
                yield f"ranges.{key}", "is in choices too; remove one"
        for name, keys in (("choices", self.choices), ("ranges", self.ranges)):
            for key in keys:
                if "." not in key.strip(".") or key != key.strip("."):
                    text = f"names {key}, which is not section.key"
                    yield name, f"{text}; write one such as model.n_kv_head"
                if key.startswith("resources."):
                    text = f"names {key}, which changes where a trial runs, not what it finds"
                    yield name, f"{text}; leave it out"

    def _find_goal_problems(self) -> Iterator[FieldMessage]:
        if len(set(self.objectives)) != len(self.objectives):
            yield "objectives", "names a number twice; name each once"
        if self.trials is None and self.flops is None and self.hours is None:
            yield "trials", "is missing, as are flops and hours; give one of them"
        if not isinstance(self.sampler, str) and not isinstance(self.sampler.get("name"), str):
            yield "sampler", "has no name; write one such as {name: TPESampler, multivariate: true}"
