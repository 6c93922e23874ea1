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
    example,
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

    low: Annotated[FiniteFloat, example(128, "of the key")]
    """Lowest number."""
    high: Annotated[FiniteFloat, example(1024, "of the key")]
    """Highest number."""
    log: Annotated[bool, example(True)] = False
    """Drawn evenly in the logarithm."""
    whole: Annotated[bool, example(True)] = False
    """Whole numbers only."""
    step: Annotated[PositiveFloat | None, example(64, "of the key")] = None
    """Only low, low + step, ..."""

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

    at_most: Annotated[FiniteFloat | None, example(32768, "of the number", default="no bound")] = (
        None
    )
    """Largest value allowed."""
    at_least: Annotated[FiniteFloat | None, example(0.25, "of the number", default="no bound")] = (
        None
    )
    """Smallest value allowed."""

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

    choices: Annotated[dict[str, Values], example({"model.n_kv_head": [1, 2, 4]})] = Field(
        default_factory=dict
    )
    """Values to choose from, by dotted key."""
    ranges: Annotated[
        dict[str, Range], example({"model.ffn_dim": {"low": 64, "high": 512, "whole": True}})
    ] = Field(default_factory=dict)
    """Ranges of numbers to draw from, by dotted key."""
    objectives: Annotated[
        TupleOf[str], Field(min_length=1, max_length=4), example(["loss_served", "kv_bytes"])
    ]
    """Numbers to improve; with several, a Pareto front."""
    limits: Annotated[dict[str, Limit], example({"kv_bytes": {"at_most": 32768}})] = Field(
        default_factory=dict
    )
    """Bounds of measured or predicted numbers."""
    sampler: Annotated[
        str | dict[str, Any], example({"name": "TPESampler", "multivariate": True})
    ] = "TPESampler"
    """A class of optuna.samplers, with its arguments as {name: TPESampler, multivariate: true}.
    Case and the ending Sampler may be left out."""
    seed: Annotated[int, Field(ge=0, lt=2**31), example(7)] = 0
    """Seed of the sampler."""
    parallel: Annotated[PositiveInt, Field(le=1000), example(2, "trials")] = 1
    """Suggestions in flight at once."""
    pruning: Annotated[PruningConfig | None, example({"rule": "halving"}, default="none")] = None
    """Pause trainings early that are far behind."""
    trials: Annotated[PositiveInt | None, example(24, "trials", default="no bound")] = None
    """Stop after this many trained suggestions."""
    flops: Annotated[PositiveFloat | None, example(1e15, "FLOPs", default="no bound")] = None
    """Stop after these training FLOPs, really spent."""
    hours: Annotated[PositiveFloat | None, example(8.0, "hours", default="no bound")] = None
    """Stop after this time of searching."""

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
